"""``python -m benchmarks.advisory``."""

import sys

from benchmarks.advisory.main import main

if __name__ == "__main__":
    sys.exit(main())
