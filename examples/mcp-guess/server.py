"""A guessing game as an MCP server, on the official SDK (pip install mcp). Each episode has a process of its own."""

import json
import os
import random

from mcp.types import CallToolResult, TextContent

try:
    from mcp.server.mcpserver import MCPServer as Server  # mcp 2
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server  # mcp 1

server = Server("guess")
task = json.loads(os.environ["ROLLCALL_TASK"])
largest, left = task.get("largest", 8), task.get("guesses", 3)
target = random.Random(int(os.environ["ROLLCALL_SEED"])).randint(1, largest)
won = False


@server.tool()
def guess(value: int) -> CallToolResult:
    """Guess the hidden number. Answers higher, lower or correct.

    Args:
        value: The number you guess.
    """
    global won, left
    left -= 1
    won = value == target
    said = "correct" if won else "lower" if value > target else "higher"
    # The episode ends here; a result without this goes on.
    over = {"rollcall/done": True} if won or left == 0 else None
    return CallToolResult(content=[TextContent(type="text", text=said)], _meta=over)


@server.tool()
def rollcall_reset(seed: int) -> str:
    """What the policy is shown first. It is never shown this tool."""
    return "The number is between 1 and %d. You have %d guesses." % (largest, left)


@server.tool()
def rollcall_score() -> float:
    """The reward. The policy is never shown this tool."""
    return 1.0 if won else 0.0


server.run()
