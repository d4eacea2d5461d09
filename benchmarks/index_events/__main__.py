"""``python -m benchmarks.index_events``."""

import sys

from benchmarks.index_events.main import main

if __name__ == "__main__":
    sys.exit(main())
