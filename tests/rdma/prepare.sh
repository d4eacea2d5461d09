#!/bin/bash
# Makes the guest's image, and the folder that it imports from; prints the words of qemu's command, one a line.
# usage: prepare.sh PYTHON SITE [PACKAGE ...]    exit: 0, or 77 if it cannot run here (the last line says why)
#   PACKAGE: what else of the environment the guest imports, beside what the transports need
#   RDMA_CACHE: where the image is kept (default ~/.cache/sglang-ext/rdma)
set -u
HERE=$(cd "$(dirname "$0")" && pwd); ROOT=$(cd "$HERE/../.." && pwd); PYTHON=$1 SITE=$2; shift 2
W=${RDMA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-ext/rdma}
skip(){ echo "SKIP: $*"; exit 77; }
[ "$(uname -m)" = x86_64 ] || skip "the RDMA guest is x86_64 only"
[ "$("$PYTHON" -c 'import sys; print(*sys.version_info[:2])')" = "3 11" ] || skip "the guest's Python is 3.11, $PYTHON is not"
mkdir -p "$W"
if [ ! -f "$W/image/initrd.img" ] || [ -n "$(find "$HERE" -newer "$W/image/initrd.img" \( -name init -o -name build_image.sh -o -name image.py \))" ]; then
  timeout 300 bash "$HERE/build_image.sh" "$W" > "$W/build.log" 2>&1 || skip "the RDMA guest cannot be built: $(tail -1 "$W/build.log")"
fi
# What the guest imports: the project, and from this environment what Debian does not have.
rm -rf "$SITE"; mkdir -p "$SITE/guest_tests"
cp -r "$ROOT/sglang_ext" "$SITE/"; cp "$HERE/guest/verbs_suite.py" "$SITE/guest_tests/test_verbs.py"  # by its name here, no host run collects it
cp "$HERE/guest/two_kernels.py" "$SITE/"
"$PYTHON" - "$SITE" "$@" <<'PY' || skip "pytest, pytest-asyncio, msgspec and pyzmq are needed in this environment"
import importlib.util, pathlib, shutil, sys
names = ("msgspec", "zmq", "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "pytest_asyncio", "typing_extensions")
for name in (*names, *sys.argv[2:]):
    spec = importlib.util.find_spec(name)
    if spec is None:
        sys.exit(1)
    path = pathlib.Path(spec.origin)
    source = path.parent if path.name == "__init__.py" else path
    copy = shutil.copytree if source.is_dir() else shutil.copy
    copy(source, pathlib.Path(sys.argv[1]) / source.name)
    for extra in source.parent.glob(f"py{name}*.libs" if name == "zmq" else f"{name.replace('_', '*')}-*.dist-info"):
        shutil.copytree(extra, pathlib.Path(sys.argv[1]) / extra.name, dirs_exist_ok=True)
PY
find "$SITE" -name __pycache__ -prune -exec rm -rf {} +
printf '[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\naddopts = -p pytest_asyncio %s\n' "${RDMA_PYTEST:-}" > "$SITE/pytest.ini"
words(){ printf '%s\n' "$@"; }
if Q=$(command -v qemu-system-x86_64); then words "$Q"
else
  Q=$W/host/usr/bin/qemu-system-x86_64; H=$W/host/usr; [ -x "$Q" ] || skip "qemu-system-x86_64 is absent"
  words env "LD_LIBRARY_PATH=$H/lib/x86_64-linux-gnu:$W/host/lib/x86_64-linux-gnu" "QEMU_MODULE_DIR=$H/lib/x86_64-linux-gnu/qemu" \
    "$Q" -L "$H/share/qemu" -L "$H/share/seabios"
fi
# /dev/kvm alone says little: a kvm without vmx or svm cannot run this kernel.
if [ -r /dev/kvm ] && [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then words -accel kvm -cpu host; else words -accel tcg,thread=multi -cpu max; fi
words -machine pc -smp 2 -m 2048 -nodefaults -no-user-config -display none -no-reboot \
  -kernel "$W/image/vmlinuz" -initrd "$W/image/initrd.img" -device isa-debug-exit,iobase=0xf4,iosize=0x04 -device virtio-rng-pci \
  -virtfs "local,path=$SITE,mount_tag=site,security_model=none,readonly=on,multidevs=remap"
