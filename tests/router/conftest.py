"""Routers in front of stand-in workers, over real sockets."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
# Helpers in this folder, and names that tests of a folder import from each other, are imported by their own
# names.
sys.path[:0] = map(str, (HERE, *sorted(HERE.glob("[a-z]*/"))))

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
