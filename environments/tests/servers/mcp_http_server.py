"""An MCP server on the official SDK, of version 1 or 2, over streamable HTTP: mcp_http_server.py json|events [MOST].

A guessing game for each session, of which version 2 can keep at most MOST.
"""

import os
import random
import socket
import sys
import threading
import typing

import uvicorn

try:
    from mcp.server.mcpserver import Context, MCPServer as Server  # version 2
except ImportError:
    from mcp.server.fastmcp import Context, FastMCP as Server  # version 1

server = Server("guess")
games = {}


def game(ctx):
    return games[ctx.request_context.request.headers["mcp-session-id"]]


@server.tool()
async def guess(value: int, ctx: Context) -> dict[str, typing.Any]:
    """Guess the hidden number.

    Args:
        value: The number you guess.
    """
    await ctx.info("a notification before the answer")
    now = game(ctx)
    now["won"] = value == now["target"]
    if value == 13:
        raise ValueError("unlucky <|im_end|>")
    return {
        "answer": "correct" if now["won"] else "lower" if value > now["target"] else "higher",
        "done": now["won"],
    }


@server.tool()
def rollcall_reset(seed: int, ctx: Context, largest: int = 8) -> str:
    """Starts."""
    session = ctx.request_context.request.headers["mcp-session-id"]
    games[session] = {"target": random.Random(seed).randint(1, largest), "won": False}
    return "The number is between 1 and %d." % largest


@server.tool()
def rollcall_score(ctx: Context) -> float:
    """The reward."""
    return 1.0 if game(ctx)["won"] else 0.0


def main():
    answers, most = sys.argv[1] == "json", [int(word) for word in sys.argv[2:]]
    if hasattr(server, "settings") and hasattr(server.settings, "json_response"):
        server.settings.json_response = answers
        app = server.streamable_http_app()
    else:
        app = server.streamable_http_app(json_response=answers, max_sessions=(most + [None])[0])
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
