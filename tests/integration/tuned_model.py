"""A fine-tune of a tiny model: everything is alike but one layer."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np


def tuned(model: Path, out: Path, *, layer: int = 1) -> Path:
    """A copy of a float32 model in which every second value of one layer's first projection has the other
    sign: a norm behind a projection would undo a factor for all. Returns ``out``."""
    shutil.copytree(model, out)
    file = out / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    projection = re.compile(rf"model\.layers\.{layer}\..*proj\w*\.weight")
    start, end = next(header[name]["data_offsets"] for name in header if projection.fullmatch(name))
    values = np.frombuffer(data, np.float32, (end - start) // 4, 8 + length + start)
    values[::2] *= -1
    file.write_bytes(data)
    return out
