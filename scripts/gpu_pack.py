"""Pack a real SGLang server with the plugin for a GPU machine that has no package index: one archive.

    python scripts/gpu_pack.py [--out .dev]

Takes wheels of the target's Python and torch from the package index here, leaves out modules that a server
does not import, and writes ``site.tar.xz`` beside the scripts that unpack and start it (``scripts/gpu``).
docs/gpu.md has the recipe. Needs here: a CPython of the target's version, to run pip for its tags.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "scripts" / "gpu"
KERNELS = {"2.11": "0.4.5"}
"""torch -> the last sglang-kernel whose `sm90/common_ops` has no symbol that this torch lacks."""
TRAVELS = (
    *("unpack.sh", "serve.sh", "first_minutes.sh"),
    *("gpu_client.py", "ask.py", "decode.py", "same.py", "verdicts.py"),
)
UNUSED = ("sglang/multimodal_gen", "sglang/test", "sglang/srt/rust_extensions/*.so")
"""Of SGLang: diffusion, test kits, servers in Rust. Two thirds, which `launch_server` does not import."""
KERNEL_UNUSED = re.compile(r"sgl_kernel/(flash_ops|flashmla_ops|infllm_ops|sm100/)")
GLIBC = (39, 36, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)
OLD_TAGS = ("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64")


def runnable(python: str) -> str | None:
    """The first command that starts: this one, or those of pyenv's versions, the newest first. pyenv puts
    commands on the path that start only where their version is chosen."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    named = os.sep not in python
    at_pyenv = [path / "bin" / python for path in versions.glob("*") if named]
    newest = sorted(
        at_pyenv, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parts[-3])], reverse=True
    )
    for found in (shutil.which(python), *map(str, newest)):
        if found is None or not Path(found).exists():
            continue
        if subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    return None


def run(*words: str) -> None:
    """Run a command; its output is shown.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run(words, check=True)


def download(python: str, version: str, folder: Path, *wanted: str) -> None:
    """Wheels for a CPython of this version, without their requirements. Kept from run to run."""
    done = folder / f".{'-'.join(wanted)[:60].replace('/', '_')}"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tags = (*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), *OLD_TAGS)
    run(
        *(python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)),
        *("--python-version", version, "--implementation", "cp"),
        *(word for tag in tags for word in ("--platform", tag)),
        *wanted,
    )
    done.touch()


def install(python: str, wheels: Path, site: Path) -> None:
    """Unpack wheels as pip does, compiling nothing."""
    quiet = ("-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir")
    run(
        python, "-m", "pip", "install", *quiet, "--target", str(site), *map(str, sorted(wheels.glob("*.whl")))
    )


def add_sglang(raw: Path, version: str, site: Path) -> None:
    """SGLang without the parts in UNUSED, and with the module that imports cutlass replaced."""
    (wheel,) = raw.glob(f"sglang-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for pattern in UNUSED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # Imported for every Llama and Qwen on CUDA, and used on SM100 only.
    shutil.copy(PARTS / "site" / "cutedsl_dual_gemm.py", site / "sglang/kernels/ops/gemm")
    (site / "IPython").mkdir()
    (site / "IPython" / "__init__.py").touch()
    (site / "IPython" / "display.py").write_text("HTML = display = clear_output = None\n", encoding="utf-8")


def add_kernels(raw: Path, version: str, site: Path) -> None:
    """``sgl_kernel`` with the operators of dense models: 19 of 1,200 MB."""
    (wheel,) = raw.glob(f"sglang_kernel-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if not KERNEL_UNUSED.match(name)]
        archive.extractall(site, members)


def add_ours(python: str, work: Path, site: Path, jit: Path | None) -> None:
    """This package from a wheel, for its entry point; and kernels that SGLang would compile at run time."""
    own = work / "own"
    shutil.rmtree(own, ignore_errors=True)
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(own), str(ROOT))
    install(python, own, site)
    for name in ("sitecustomize.py", "prebuilt_jit.py"):
        shutil.copy(PARTS / "site" / name, site)
    if jit is not None:
        shutil.copytree(jit, site / "sglang_jit")


def archive(site: Path, target: Path) -> int:
    """Pack without bytecode; returns the size in bytes."""
    for folder in [*site.rglob("__pycache__"), site / "bin", site / "share"]:
        shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(target, "w:xz", preset=3) as packed:
        for path in sorted(site.iterdir()):
            packed.add(path, path.name)
    return target.stat().st_size


def arguments() -> argparse.Namespace:
    """The command line, completed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / ".dev", help="folder that travels")
    parser.add_argument("--python", default="python3.12", help="a CPython of the target's version, with pip")
    parser.add_argument("--torch", default="2.11", help=f"of the target: {', '.join(KERNELS)}")
    parser.add_argument("--kernel", help="sglang-kernel for another torch")
    parser.add_argument("--sglang", default="0.5.23")
    parser.add_argument("--limit", type=float, default=48.0, help="MiB that the archive may have")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "sglang-gpu-pack", help="folder for wheels"
    )
    parser.add_argument("--jit", type=Path, help="folder of kernels compiled for the target's card")
    given = parser.parse_args()
    python = runnable(given.python)
    if python is None:
        parser.error(f"no {given.python} starts here; name a CPython of the target's version by --python")
    given.python = python
    given.kernel = given.kernel or KERNELS.get(".".join(given.torch.split(".")[:2]))
    if given.kernel is None:
        parser.error(f"no sglang-kernel is known for torch {given.torch}; name one by --kernel")
    return given


def main() -> int:
    """Returns the exit status: 1 when the archive is too large."""
    given = arguments()
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.run(
        [given.python, "-c", asked], check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout.strip()
    wheels, raw, site = given.work / f"wheels-{version}", given.work / "raw", given.work / "site"
    lines = (PARTS / "wheels.txt").read_text(encoding="utf-8").splitlines()
    download(given.python, version, wheels, *(line for line in lines if line and not line.startswith("#")))
    download(given.python, version, raw, f"sglang=={given.sglang}", f"sglang-kernel=={given.kernel}")
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    install(given.python, wheels, site)
    add_sglang(raw, given.sglang, site)
    add_kernels(raw, given.kernel, site)
    add_ours(given.python, given.work, site, given.jit)
    given.out.mkdir(parents=True, exist_ok=True)
    size = archive(site, given.out / "site.tar.xz") / (1 << 20)
    for name in TRAVELS:
        shutil.copy(PARTS / name, given.out)
    print(
        f"{given.out}/site.tar.xz: {size:.1f} MiB of {given.limit:.0f}; Python {version}, torch {given.torch}"
    )
    return 1 if size > given.limit else 0


if __name__ == "__main__":
    sys.exit(main())
