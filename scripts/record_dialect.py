"""Record the answers of a real SGLang server, to check the stand-ins against.

    python -m scripts.record_dialect

Starts a server of a tiny model, asks it everything in ``tests.support.servers.dialect`` and writes
tests/router/dialect.json. To be run for a new version of SGLang, and its difference to be read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "integration"))

from router_rig import SPECS  # noqa: E402 - the server that the router's tests share

from tests.support.servers.dialect import record  # noqa: E402
from tests.support.servers.server import ServerProcess  # noqa: E402

RECORDING = ROOT / "tests" / "router" / "dialect.json"


def main() -> None:
    with ServerProcess(SPECS[0]) as server:
        found = record(server.url)
    RECORDING.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(f"{len(found)} exchanges in {RECORDING.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
