"""``python -m sglang_ext.router``: run the router from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang_ext.errors import SglangExtError, UserError
from sglang_ext.router.app.run import run
from sglang_ext.router.app.workers import run_workers
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.shadow import run_shadow


def main(arguments: Sequence[str] | None = None, prog: str = RouterConfig.prog) -> int:
    """Run until interrupted. Returns the exit status: 0, 1 for a failure, 2 for a wrong flag."""
    try:
        config = RouterConfig.parse(arguments, prog=prog)
        if config.check:
            return 0
        if config.shadow:
            run_shadow(config)
        else:
            run(config) if config.workers == 1 else run_workers(config)
    except UserError as error:
        sys.stderr.write(f"router: {error}\n")
        return 2
    except SglangExtError as error:
        sys.stderr.write(f"router: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(prog="python -m sglang_ext.router"))
