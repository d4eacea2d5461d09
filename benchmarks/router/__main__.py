"""``python -m benchmarks.router``."""

import sys

from benchmarks.router.main import main

if __name__ == "__main__":
    sys.exit(main())
