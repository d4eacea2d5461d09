"""``python -m benchmarks.policies``."""

import sys

from benchmarks.policies.main import main

if __name__ == "__main__":
    sys.exit(main())
