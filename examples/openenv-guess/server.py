"""A guessing game as an OpenEnv server (pip install openenv): python server.py [PORT]."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """Guess the hidden number. Answers higher, lower or correct."""

    value: int


class Answer(Observation):
    text: str


class GuessingGame(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, largest=8, guesses=3):
        self.target, self.left = random.Random(seed).randint(1, largest), guesses
        return Answer(text="The number is between 1 and %d. You have %d guesses." % (largest, guesses))

    def step(self, action, timeout_s=None, **_):
        self.left -= 1
        won = action.value == self.target
        said = "correct" if won else "lower" if action.value > self.target else "higher"
        return Answer(text=said, reward=float(won), done=won or self.left == 0)

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    # As many sessions as all actors and the learner's replay have at once.
    app = create_fastapi_app(GuessingGame, Guess, Answer, max_concurrent_envs=256)
    uvicorn.run(app, port=int(sys.argv[1]) if sys.argv[1:] else 8000, log_level="warning")
