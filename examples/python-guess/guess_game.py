"""A guessing game as TRL's `environment_factory` takes it. Rollcall runs the class as it is."""

import random


class GuessGame:
    """Find a number from 1 to `largest` with a few guesses."""

    def __init__(self):
        self.largest = 8
        self.left = 0
        self.target = None
        self.solved = False

    def reset(self, largest=8, guesses=3, **row):
        # The episode's seed has been given to `random` already.
        self.largest = largest
        self.left = guesses
        self.target = random.randint(1, largest)
        self.solved = False
        return f"The number is between 1 and {largest}. You have {guesses} guesses."

    def guess(self, value: int):
        """
        Guess the hidden number. Answers higher, lower or correct.

        Args:
            value: The number you guess.
        """
        if self.done:
            raise ValueError("Game over.")
        self.left -= 1
        if value == self.target:
            self.solved = True
            return "correct"
        return "lower" if value > self.target else "higher"

    @property
    def done(self):
        return self.solved or self.left <= 0

    def get_reward(self) -> float:
        return 1.0 if self.solved else 0.0
