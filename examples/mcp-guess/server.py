"""A guessing game as an MCP server, on the official SDK (pip install mcp).

    python server.py          over standard input and output: each episode has a process of its own
    python server.py 8000     over HTTP, at http://localhost:8000/mcp: each episode has a session of its own
"""

import random
import sys

from mcp.types import CallToolResult, TextContent

try:
    from mcp.server.mcpserver import Context, MCPServer as Server  # mcp 2
except ImportError:
    from mcp.server.fastmcp import Context, FastMCP as Server  # mcp 1

server = Server("guess")
games = {}


class Game:
    def __init__(self, seed, largest, guesses):
        self.target, self.left, self.won = random.Random(seed).randint(1, largest), guesses, False


def session(ctx):
    """Names the episode. Over HTTP, sessions share this process: what an episode changes belongs to its session."""
    request = ctx.request_context.request
    return request and request.headers["mcp-session-id"]


@server.tool()
def guess(value: int, ctx: Context) -> CallToolResult:
    """Guess the hidden number. Answers higher, lower or correct.

    Args:
        value: The number you guess.
    """
    game = games[session(ctx)]
    game.left -= 1
    game.won = value == game.target
    said = "correct" if game.won else "lower" if value > game.target else "higher"
    # The episode ends here; a result without this goes on.
    over = {"rollcall/done": True} if game.won or game.left == 0 else None
    return CallToolResult(content=[TextContent(type="text", text=said)], _meta=over)


@server.tool()
def rollcall_reset(seed: int, ctx: Context, largest: int = 8, guesses: int = 3) -> str:
    """Starts the episode and says what the policy is shown first. It is never shown this tool."""
    games[session(ctx)] = Game(seed, largest, guesses)
    return "The number is between 1 and %d. You have %d guesses." % (largest, guesses)


@server.tool()
def rollcall_score(ctx: Context) -> float:
    """The reward. The policy is never shown this tool."""
    return 1.0 if games.pop(session(ctx)).won else 0.0


if sys.argv[1:]:
    import uvicorn

    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="warning")
else:
    server.run()
