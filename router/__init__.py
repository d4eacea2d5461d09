"""The router: one address in front of several SGLang servers, sending each prompt to who has its KV.

``python -m sglang_ext.router --worker-urls URL [URL ...]`` (``python -m router`` in a checkout), or
``run(RouterConfig(...))``, or, in a program with an event loop, ``async with Router(config) as router``.
"""

from pathlib import Path

from sglang_ext.router import native

native.use("sglang_ext.router", Path(__file__).parent)

from sglang_ext.router.app.run import Router, run  # noqa: E402
from sglang_ext.router.config import RouterConfig  # noqa: E402

__all__ = ["Router", "RouterConfig", "run"]
