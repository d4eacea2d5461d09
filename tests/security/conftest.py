"""Attacks that have been tried: routers in front of stand-in workers, as the tests of the router have
them."""

from __future__ import annotations

import sys
from pathlib import Path

ROUTER = Path(__file__).parents[1] / "router"
sys.path[:0] = map(str, (ROUTER, *sorted(ROUTER.glob("[a-z]*/"))))

from fleets import (  # noqa: E402, F401 - found by the line above; fixtures
    client,
    eventually,
    loads_once,
    router_logs,
    stack,
    start_router,
    start_worker,
    tokenizer,
)
