"""The router: one address in front of several SGLang servers, sending each prompt to who has its KV.

``python -m router --worker-urls URL [URL ...]``, or ``router.run(RouterConfig(...))``, or, inside a
program that has an event loop, ``async with Router(config) as router``.
"""

from router.config import RouterConfig
from router.run import Router, run

__all__ = ["Router", "RouterConfig", "run"]
