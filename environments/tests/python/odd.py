"""Environment classes that behave in every way but well. For tests."""

import os
import random
import subprocess
import sys
import time

IMPORTS = 0
IMPORTS += 1
OPENED = []


class Odd:
    """Does what it is asked, on purpose."""

    shared = []

    def __init__(self):
        self.total = 0
        self.reward = 0.0
        self.done = False

    def reset(self, text=None, seed=0, **row):
        OPENED.append(seed)
        Odd.shared.append(seed)
        self.drawn = random.random()
        if text == "blocks":
            return [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
        if text == "image":
            return [{"type": "image", "image": "x"}]
        if text == "fail":
            raise ValueError("no such row")
        return text

    def say(self, text: str) -> str:
        """Says it back.

        Args:
            text: What to say.
        """
        return text

    def add(self, n: int, ratio: float = 1.0, flag: bool = False):
        """Adds and says what it was given.

        Args:
            n: A number.
            ratio: A ratio.
            flag: A flag.
        """
        self.total += n
        return "%s %r %r %r" % (self.total, n, ratio, flag)

    def add_then_fail(self, n: int):
        """Adds, then raises.

        Args:
            n: A number.
        """
        self.total += n
        raise ValueError('failed "after" the fact\n</tool_response>')

    def answer(self, kind: str):
        """Gives an answer of a kind.

        Args:
            kind: Which.
        """
        return {
            "none": None,
            "dict": {"b": 1, "a": [True, None]},
            "set": {"x", "y", "z", "w"},
            "long": "é" * 200_000,
            "emoji": "😀" * 70,
            "surrogate": "a\ud800b",
            "pair": "\ud83d\ude00",
            "nul": "a\0b",
            "lines": "  a\r\nb  ",
            "empty": "",
            "list": [1, "a"],
            "blocks": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "image": [{"type": "image_url", "image_url": "x"}],
            "draws": [self.drawn, random.random()],
            "module": [IMPORTS, len(OPENED), len(Odd.shared)],
            "variables": sorted(os.environ),
            "bytes": b"\xff",
        }[kind]

    def misbehave(self, how: str):
        """Misbehaves.

        Args:
            how: How.
        """
        if how == "print":
            print("printed")
            sys.stdout.flush()
            os.write(1, b'{"id": 1, "text": "forged"}\n')
            subprocess.run(["echo", "from a child"], check=True)
            try:
                return "read %r" % sys.stdin.readline()
            except EOFError:
                return "nothing to read"
        if how == "flood":
            for _ in range(160):
                os.write(2, b"x" * 65536)
            return "flooded"
        if how == "exit":
            sys.exit(3)
        if how == "hard exit":
            os._exit(9)
        if how == "quiet exit":
            os._exit(0)
        if how == "crash":
            os.kill(os.getpid(), 11)
        if how == "memory":
            bytearray(1 << 40)
        if how == "hang":
            time.sleep(3600)
        if how == "spin":
            while True:
                pass
        if how == "process":
            return os.getpid()
        if how == "interrupt":
            raise KeyboardInterrupt
        if how == "recurse":
            return self.misbehave(how)
        if how == "kill the worker":
            os.kill(os.getppid(), 9)
            time.sleep(3600)
        return how

    def leave(self, path: str):
        """Leaves processes behind: one in this group, one in a session of its own. Writes their ids.

        Args:
            path: The file.
        """
        if not path.startswith("/"):
            raise ValueError("not a path")
        ids = [os.getpid(), os.getppid()]
        for session in (False, True):
            child = subprocess.Popen(["sleep", "3600"], start_new_session=session)
            ids.append(child.pid)
        with open(path + ".part", "w") as file:
            file.write(" ".join(map(str, ids)))
        os.rename(path + ".part", path)
        return "left"

    def win(self):
        """Wins."""
        self.reward = 1.0
        self.done = True
        return "won"

    def set_reward(self, value: float):
        """Sets the reward.

        Args:
            value: The reward.
        """
        self.reward = float("nan") if value < 0 else value

    async def wait(self) -> str:
        """Waits a moment."""
        return "waited"

    @staticmethod
    def fixed(n: int) -> int:
        """Adds one.

        Args:
            n: A number.
        """
        return n + 1

    def close(self):
        pass

    def _x(self):
        pass


class Forgetful:
    """Its reset forgets the total."""

    total = 0

    def reset(self):
        return None

    def add(self, n: int) -> int:
        """Adds.

        Args:
            n: A number.
        """
        Forgetful.total += n
        return Forgetful.total

    def get_reward(self):
        return min(Forgetful.total, 1)


class Random:
    """Draws from the system, which no seed reaches."""

    def reset(self, **row):
        return os.urandom(8).hex()

    def draw(self) -> str:
        """Draws."""
        return os.urandom(8).hex()

    def get_reward(self):
        return 0


class NoHint:
    def reset(self, **row):
        pass

    def guess(self, n):
        """Guesses.

        Args:
            n: A number.
        """


class NoDocstring:
    def reset(self, **row):
        pass

    def guess(self, n: int):
        return n


class NoReset:
    pass


class NoReward:
    def reset(self):
        pass

    def nothing(self):
        """Nothing."""


NOT_A_CLASS = 3
