"""``python -m benchmarks.transfer``."""

import os
import sys

from benchmarks.transfer.main import main

if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the peers' libraries crash in their destructors
