"""Real workloads for tests and benchmarks: where they lie, and reading them. None is part of the project.

The folder is given by ``--data``, else by the variable ``SGLANG_EXT_DATA``, else it is ``../shared/data``
beside the checkout. Each of its folders has a SOURCE.txt that says where the data comes from.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from sglang_ext.errors import ConfigError
from sglang_ext.flags import flag

VARIABLE = "SGLANG_EXT_DATA"
ROOT = Path(__file__).resolve().parents[2]
"""The checkout."""
_BESIDE = ROOT.parent / "shared" / "data"


def data_flag() -> Any:
    """The field of a benchmark's options that names the folder with the workloads."""
    return flag(None, f"The folder with the workloads. Not given: the variable {VARIABLE}.", metavar="DIR")


def data_folder(given: str | None = None) -> Path:
    """The folder with the workloads.

    Raises:
        ConfigError: it is not there; names the places that were searched.
    """
    folder = Path(given or os.environ.get(VARIABLE) or _BESIDE)
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder} with workloads",
            field="--data",
            hint=f"Name the folder with --data or {VARIABLE}",
        )
    return folder


def rows(folder: Path, name: str) -> Iterator[dict[str, object]]:
    """The objects of a file of JSON lines, gzipped or not, in its order.

    Args:
        name: the file, below ``folder``.

    Raises:
        ConfigError: it is missing, or holds something else.
    """
    path = folder / name
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = orjson.loads(line)
                if not isinstance(row, dict):
                    raise ConfigError(f"line {number} of {path} is not an object", field="--data")
                yield row
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing", field="--data", hint="Name another folder") from error
    except (OSError, EOFError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="--data") from error
