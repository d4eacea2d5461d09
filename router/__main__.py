"""``python -m sglang_ext.router``: run the router from the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang_ext.errors import SglangExtError, UserError
from sglang_ext.router.app.run import run
from sglang_ext.router.config import RouterConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until interrupted. Returns the exit status: 0, 1 for a failure, 2 for a wrong flag."""
    try:
        run(RouterConfig.parse(arguments))
    except UserError as error:
        sys.stderr.write(f"router: {error}\n")
        return 2
    except SglangExtError as error:
        sys.stderr.write(f"router: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
