"""Tools of every kind of hint that can be described."""
import enum
from typing import Any, Literal, Optional, Union


class Color(enum.Enum):
    RED = "red"
    ONE = 1


class Schemas:
    def reset(self, **row):
        return None

    def plain(self, n: int, ratio: float, text: str, flag: bool):
        """
        Takes the simple kinds.

        Args:
            n: A number,
                on two lines.
            ratio: A ratio.
            text: A text: with a colon.
            flag: A flag.
        """

    def optional(self, n: Optional[int] = None, text: "str | None" = None, any: Any = 1) -> str:
        """Takes what may be absent.

        Args:
            n: A number.
            text: A text.
            any: Anything.

        Returns:
            What it says.
        """

    def choices(self, way: Literal["up", "down"], level: Literal[1, 2], color: str) -> Optional[int]:
        """Chooses.

        Args:
            way: The way.
            level: The level.
            color: A color (choices: ["red", "green"])

        Returns:
            int: The place.

        Raises:
            ValueError: Never.
        """

    def nested(
        self,
        rows: list[list[int]],
        pair: tuple[int, str],
        counts: dict[str, int],
        either: Union[int, str],
        many: Union[list[int], str],
        bare: list,
        table: dict,
    ) -> dict[str, list[int]]:
        """Takes nested kinds.

        Args:
            rows: Rows.
            pair: A pair.
            counts: Counts.
            either: Either.
            many: Many.
            bare: A list.
            table: A table.
        """

    @staticmethod
    def fixed(n: int) -> int:
        """Static.

        Args:
            n: A number.
        """
        return n

    def styles(self, color: Color, mixed: Literal["a", 1, None], n: int = 3) -> "Schemas":
        """Describes in other styles.

        More on it.

        Args:
            color (Color): A color.
            mixed (`str`): Mixed:
                more of it.
            n (int): A number (choices: [1, 2, 3])
        """

    def nothing(self) -> None:
        """Takes nothing."""

    @classmethod
    def other(cls):
        pass

    @property
    def shown(self):
        return 1

    def close(self):
        pass

    def _hidden(self):
        pass

    def get_reward(self) -> float:
        return 1.0
