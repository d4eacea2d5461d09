"""Tokens that a server computes for each turn of agents' recorded sessions, without and with the rules.

    python -m benchmarks.agents.clients [--write docs/benchmarks]

The sessions are those of ``tests/integration/router/recorded``: sent by the real clients, and trimmed. A tiny
server answers them through a router; before each session its cache is empty.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.lib.plots import Axis, bars
from sglang_ext.router import Router, RouterConfig
from tests.support.servers.server import ServerProcess, ServerSpec

RECORDED = Path(__file__).parents[2] / "tests" / "integration" / "router" / "recorded"
FLAGS = (
    *("--radix-cache-backend", "global", "--max-total-tokens", "32768"),
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"),
    *("--chat-template", str(RECORDED / "tools.jinja")),
)
LIMIT = {"/v1/responses": "max_output_tokens"}
NO_CACHE, OFF, ON = "no cache", "rules off", "rules on"
Turn = tuple[int, int]
"""(tokens of the prompt, how many of them were cached)."""


async def play(server: ServerProcess, requests: Sequence[dict[str, Any]], rules: str) -> list[Turn]:
    """The turns of a session, in order, by a router with an empty index before an empty server."""
    server.flush()
    turns = []
    router = Router(RouterConfig(worker_urls=(server.url,), port=0, client_rules=rules))
    async with router, aiohttp.ClientSession() as session:
        for number, request in enumerate(requests):
            path = request["path"]
            body = {**request["body"], "temperature": 0, "stream": False, LIMIT.get(path, "max_tokens"): 8}
            body.pop("stream_options", None)
            headers = {**request["headers"], "x-request-id": f"turn-{number}"}
            async with session.post(router.url + path, json=body, headers=headers) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"turn {number}: {await answer.text()}")
                await answer.read()
            async with session.get(f"{router.url}/explain/turn-{number}") as explained:
                told = await explained.json()
            turns.append((told["prompt"]["tokens"], told["cached"]["tokens"] or 0))
    return turns


def computed(off: Sequence[Turn], on: Sequence[Turn]) -> dict[str, list[float | None]]:
    """The series of a picture: tokens computed per turn."""
    return {
        NO_CACHE: [float(prompt) for prompt, _ in off],
        OFF: [float(prompt - cached) for prompt, cached in off],
        ON: [float(prompt - cached) for prompt, cached in on],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Play all recordings, print a row for each, and draw them."""
    parser = argparse.ArgumentParser(description="Tokens computed per turn of agents' recorded sessions.")
    parser.add_argument("--write", type=Path, metavar="DIR", help="folder of the pictures")
    folder: Path | None = parser.parse_args(arguments).write
    with ServerProcess(ServerSpec(flags=FLAGS)) as server:
        for path in sorted(RECORDED.glob("*.json")):
            recorded = json.loads(path.read_text("utf-8"))
            off, on = (asyncio.run(play(server, recorded["requests"], rules)) for rules in ("off", "auto"))
            series = computed(off, on)
            name = f"{recorded['client']} {recorded['version']}"
            totals = ", ".join(f"{kind}: {sum(value or 0 for value in series[kind]):,.0f}" for kind in series)
            print(f"{name}: {len(on)} turns; tokens computed with {totals}")
            if folder is not None:
                turns = [str(number + 1) for number in range(len(on))]
                picture = bars(f"{name}: tokens computed per turn", Axis("tokens"), turns, series)
                (folder / f"agents-{path.stem.replace('_', '-')}.svg").write_text(picture, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
