"""A server with HiCache whose store a test has written, by `tests/engine/oracle/engine_hicache.py`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_ext.geometry import BlockLayout

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "engine" / "oracle" / "engine_hicache.py"


@dataclass(frozen=True)
class HiCacheServer:
    """The facts on which names and bytes of its files depend.

    order: the ``--hicache-mem-layout``. heads: of a rank; 0 with MLA.
    """

    folder: Path
    model: str
    order: str
    page_tokens: int
    layers: int
    heads: int
    row_bytes: int
    dtype: str = "float32"
    tp_rank: int = 0
    tp_size: int = 1


def rows_of(layout: BlockLayout, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Blocks, shape (n, block bytes), as rows, shape (planes, layers, tokens, bytes)."""
    planes, row = len(layout.layers[0]), layout.row_bytes[0]
    rows = blocks.reshape(len(blocks), layout.n_layers, planes, layout.block_tokens, row)
    return rows.transpose(2, 1, 0, 3, 4).reshape(planes, layout.n_layers, -1, row)


def write_elsewhere(
    server: HiCacheServer, tokens: list[int], kv: npt.NDArray[np.uint8], scratch: Path
) -> None:
    """Write the pages of a prompt in a process of its own, because importing SGLang on a CPU changes one.

    Args:
        kv: shape (planes, layers, tokens, bytes).
        scratch: a file for the request.
    """
    scratch.write_bytes(pickle.dumps((server, tokens, kv)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(PROGRAM), str(scratch)], check=True, timeout=300, env=environment)
