"""``python -m benchmarks.cost_model``."""

import sys

from benchmarks.cost_model.main import main

if __name__ == "__main__":
    sys.exit(main())
