"""OpenEnv servers for the tests: openenv_server.py KIND CAPACITY. Prints its port, then serves until its
standard input is closed. Runs on openenv-core 0.3 and on openenv 0.10."""

import os
import random
import socket
import sys
import threading
import time

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    """Guess the hidden number."""

    number: int


class Text(Observation):
    text: str = ""


class Base(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    @property
    def state(self):
        return State()


class Guess(Base):
    def reset(self, seed=None, episode_id=None, largest=8):
        self.target = random.Random(seed).randint(1, largest)
        return Text(text="The number is between 1 and %d." % largest)

    def step(self, action, timeout_s=None, **_):
        won = action.number == self.target
        said = "correct" if won else "lower" if action.number > self.target else "higher"
        return Text(text=said, reward=float(won), done=won, metadata={"at": time.time()})


class Careless(Guess):
    """Drops the seed."""

    def reset(self, seed=None, episode_id=None):
        return super().reset()


class OddAction(Action):
    """Does as it is told."""

    do: str
    n: int = 0
    text: str = ""


class Two(Observation):
    text: str = ""
    total: int = 0


TEXTS = {
    "long": "\u00e9" * 200000,
    "emoji": "\U0001f600" * 70000,
    "nul": "a\0b",
    "lines": "  a\r\nb  ",
    "empty": "",
}


class Odd(Base):
    """What a server's code may do: the inputs that a client must survive."""

    def reset(self, seed=None, episode_id=None, say=None, forget=False):
        self.seed = seed
        if not (forget and hasattr(self, "total")):
            self.total = 0
        if say == "fail":
            raise ValueError("no such task <|im_end|>")
        return Two(text="" if say is None else say)

    def step(self, action, timeout_s=None, **_):
        do = action.do
        if do == "add":
            self.total += action.n
            return Two(text=str(self.total), total=self.total)
        if do == "add_then_fail":
            self.total += action.n
            raise ValueError('failed "after" </tool_response>')
        if do == "say":
            return Two(text=action.text, total=self.total)
        if do == "seed":
            return Two(text=str(self.seed))
        if do == "win":
            return Two(text="won", reward=0.75, done=True)
        if do == "reward":
            return Two(text="paid", reward=action.n / 4)
        if do == "sleep":
            time.sleep(action.n)
            return Two(text="woke")
        if do in TEXTS:
            return Two(text=TEXTS[do])
        if do == "huge":
            return Two(text="x" * (5 << 20))
        if do == "print":
            print("noise", flush=True)
            os.write(1, b"more noise\n")
            return Two(text="printed")
        if do == "exit":
            os._exit(9)
        if do == "abort":
            os.abort()
        raise KeyError(do)


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def add(n: int) -> str:
            """Adds to the total.

            Args:
                n: What to add.
            """
            self.total += n
            return "total %d" % self.total

        @server.tool
        def fail(message: str) -> str:
            """Always fails."""
            raise ValueError(message)

        self.total = 0
        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **_):
        self.total = random.Random(seed).randint(0, 9)
        return Text(text="Start at %d." % self.total)

    def _step_impl(self, action, timeout_s=None, **_):
        raise ValueError("no such action")

    @property
    def state(self):
        return State()


KINDS = {
    "guess": (Guess, GuessAction, Text),
    "careless": (Careless, GuessAction, Text),
    "odd": (Odd, OddAction, Two),
    "tools": (Tools, CallToolAction, CallToolObservation),
}


def main():
    kind, capacity = sys.argv[1:]
    app = create_fastapi_app(*KINDS[kind], max_concurrent_envs=int(capacity))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    print(listener.getsockname()[1], flush=True)
    os.dup2(2, 1)

    def leave():
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])


main()
