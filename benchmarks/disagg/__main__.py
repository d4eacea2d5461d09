"""``python -m benchmarks.disagg``."""

import sys

from benchmarks.disagg.main import main

if __name__ == "__main__":
    sys.exit(main())
