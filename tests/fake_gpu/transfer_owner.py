"""`sglang_ext.testing.transfer.owner` with its pool in the memory of an emulated GPU."""

from __future__ import annotations

import asyncio
import json
import sys

from tests import fake_gpu

fake_gpu.install(sglang=False)

from sglang_ext.engine.movers import row_copies  # noqa: E402
from sglang_ext.engine.movers.gpu_memory import GpuMemory  # noqa: E402
from sglang_ext.testing.transfer.owner import main  # noqa: E402
from tests.fake_gpu.ipc import copy_by_host  # noqa: E402

row_copies.launcher = lambda: copy_by_host
asyncio.run(main(json.loads(sys.argv[1]), GpuMemory(0)))
