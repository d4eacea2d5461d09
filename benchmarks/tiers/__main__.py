"""``python -m benchmarks.tiers``."""

import sys

from benchmarks.tiers.main import main

if __name__ == "__main__":
    sys.exit(main())
