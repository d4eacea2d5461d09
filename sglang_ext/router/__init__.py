"""The router: one address in front of several SGLang servers, sending each prompt to who has its KV.

``python -m sglang_ext.router --worker-urls URL [URL ...]`` (``python -m router`` in a checkout), or
``run(RouterConfig(...))``, or, in a program with an event loop, ``async with Router(config) as router``.
"""

from sglang_ext.router.app.run import Router, run
from sglang_ext.router.config import RouterConfig

__all__ = ["Router", "RouterConfig", "run"]
