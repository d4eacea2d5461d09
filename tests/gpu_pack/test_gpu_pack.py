"""The archive for a GPU machine without a package index: packed, unpacked and imported by the target's Python
and torch.

Needs the package index, a CPython 3.12, and some minutes. In the environment that is made here torch is the
target's, with CUDA, which only finds no GPU. Other targets: SGLANG_EXT_PACK_PYTHON, SGLANG_EXT_PACK_TORCH and
SGLANG_EXT_PACK_LIMIT (MiB).
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
PACK = runpy.run_path(str(ROOT / "scripts" / "gpu_pack.py"))
PYTHON = os.environ.get("SGLANG_EXT_PACK_PYTHON", "python3.12")
TORCH = os.environ.get("SGLANG_EXT_PACK_TORCH", "2.11.0")
LIMIT = os.environ.get("SGLANG_EXT_PACK_LIMIT", "48")
ON_THE_MACHINE = (
    "transformers==5.17.0",
    "numba",
    "uvloop",
    "aiohttp",
    "psutil",
    "prometheus-client",
    "pillow",
    "scipy",
    "einops",
    "nvidia-ml-py",
    "xxhash",
    "httpx",
    "torchvision",
)
"""Packages, beside torch, that such a machine has."""
SERVER = (
    *("sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager", "sglang.srt.models.llama"),
    *("sglang.srt.entrypoints.http_server", "sglang.srt.layers.attention.triton_backend"),
    *("sglang_ext.patches.adapter.build", "sglang_ext.gpu_check.serving"),
)
"""Modules that a server's processes import. Not ``sgl_kernel``: it looks for a library of the card's
generation, and here is no card."""


def run(*words: str, **more: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    return str(done.stdout)


FOUND = PACK["runnable"](PYTHON)


@pytest.mark.skipif(FOUND is None, reason=f"no {PYTHON} starts here, on the path or of pyenv's versions")
def test_what_is_packed_is_unpacked_and_imported(tmp_path: Path) -> None:
    out = tmp_path / "checkout" / ".dev"
    pack = ("--out", str(out), "--python", str(FOUND), "--torch", TORCH, "--limit", LIMIT)
    said = run(sys.executable, str(ROOT / "scripts" / "gpu_pack.py"), *pack, "--work", str(tmp_path / "work"))
    assert "site.tar.xz" in said
    assert {path.name for path in out.iterdir()} >= {
        "site.tar.xz",
        "unpack.sh",
        "serve.sh",
        "first_minutes.sh",
        "verdicts.py",
    }
    shutil.rmtree(tmp_path / "work")

    venv = tmp_path / "venv"
    run(str(FOUND), "-m", "venv", str(venv))
    run(str(venv / "bin" / "pip"), "install", "-q", f"torch=={TORCH}", *ON_THE_MACHINE)
    imports = "; ".join(f"import {name}" for name in SERVER)
    found = run(
        *("bash", "-c", f'source .dev/unpack.sh && python3 -c "{imports}; print(sglang.__file__)"'),
        cwd=out.parent,
        env={**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "SITE": str(tmp_path / "site")},
    )
    assert found.strip().startswith(str(tmp_path / "site"))
