"""An MCP server on the official SDK, of version 1 or 2: a guessing game."""

import json
import os
import random
import typing

try:
    from mcp.server.mcpserver import MCPServer as Server  # version 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server  # version 1

server = Server("guess")
largest = json.loads(os.environ["ROLLCALL_TASK"]).get("largest", 8)
target = random.Random(int(os.environ["ROLLCALL_SEED"])).randint(1, largest)
won = False


@server.tool()
def guess(value: int) -> dict[str, typing.Any]:
    """Guess the hidden number.

    Args:
        value: The number you guess.
    """
    global won
    won = value == target
    if value == 13:
        raise ValueError("unlucky <|im_end|>")
    return {"answer": "correct" if won else "lower" if value > target else "higher", "done": won}


@server.tool()
def rollcall_reset(seed: int) -> str:
    """Starts."""
    return "The number is between 1 and %d." % largest


@server.tool()
def rollcall_score() -> float:
    """The reward."""
    return 1.0 if won else 0.0


server.run()
