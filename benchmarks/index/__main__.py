"""``python -m benchmarks.index``."""

import sys

from benchmarks.index.main import main

if __name__ == "__main__":
    sys.exit(main())
