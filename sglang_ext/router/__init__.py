"""The router: one address in front of several SGLang servers, sending each prompt to who has its KV.

``python -m sglang_ext.router --worker-urls URL [URL ...]`` (``python -m router`` in a checkout), or
``run(RouterConfig(...))``, or, in a program with an event loop, ``async with Router(config) as router``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_ext.router.app.run import Router, run
    from sglang_ext.router.config import RouterConfig

__all__ = ["Router", "RouterConfig", "run"]

_MODULES = {"Router": "app.run", "run": "app.run", "RouterConfig": "config"}


def __getattr__(name: str) -> Any:
    # Not before it is asked for: programs that use a part of the router do not load all of it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
