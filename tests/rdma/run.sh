#!/bin/bash
# The verbs transport's tests in a guest with a real (software) RDMA device; no privileges, nothing installed.
# usage: run.sh [PYTHON]    exit: 0 passed, 77 skipped (the line says why), else failed
#   RDMA_CACHE: where the image is kept (default ~/.cache/sglang-ext/rdma)     RDMA_LIMIT: seconds for the guest
#   RDMA_PYTEST: more arguments for pytest, such as -k scattered
set -u
HERE=$(cd "$(dirname "$0")" && pwd); ROOT=$(cd "$HERE/../.." && pwd); PYTHON=${1:-python3}
W=${RDMA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-ext/rdma}; LIMIT=${RDMA_LIMIT:-240}
skip(){ echo "SKIP: $*"; exit 77; }
[ "$(uname -m)" = x86_64 ] || skip "the RDMA guest is x86_64 only"
[ "$("$PYTHON" -c 'import sys; print(*sys.version_info[:2])')" = "3 11" ] || skip "the guest's Python is 3.11, $PYTHON is not"
mkdir -p "$W"
if [ ! -f "$W/image/initrd.img" ] || [ -n "$(find "$HERE" -newer "$W/image/initrd.img" \( -name init -o -name build_image.sh -o -name image.py \))" ]; then
  timeout 300 bash "$HERE/build_image.sh" "$W" > "$W/build.log" 2>&1 || skip "the RDMA guest cannot be built: $(tail -1 "$W/build.log")"
fi
# What the guest imports: the project, and from this environment what Debian does not have.
SITE=$W/site; rm -rf "$SITE"; mkdir -p "$SITE/guest_tests"
cp -r "$ROOT/sglang_ext" "$SITE/"; cp "$HERE/guest/verbs_suite.py" "$SITE/guest_tests/test_verbs.py"  # by its name here, no host run collects it
"$PYTHON" - "$SITE" <<'PY' || skip "pytest, pytest-asyncio, msgspec and pyzmq are needed in this environment"
import importlib.util, pathlib, shutil, sys
for name in ("msgspec", "zmq", "pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "pytest_asyncio", "typing_extensions"):
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
if Q=$(command -v qemu-system-x86_64); then EXTRA=()
else
  Q=$W/host/usr/bin/qemu-system-x86_64; H=$W/host/usr; [ -x "$Q" ] || skip "qemu-system-x86_64 is absent"
  export LD_LIBRARY_PATH=$H/lib/x86_64-linux-gnu:$W/host/lib/x86_64-linux-gnu QEMU_MODULE_DIR=$H/lib/x86_64-linux-gnu/qemu
  EXTRA=(-L "$H/share/qemu" -L "$H/share/seabios")
fi
# /dev/kvm alone says little: a kvm without vmx or svm cannot run this kernel.
if [ -r /dev/kvm ] && [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then CPU=(-accel kvm -cpu host); else CPU=(-accel tcg,thread=multi -cpu max); fi
LOG=$W/guest.log
timeout -k 5 "$LIMIT" "$Q" "${EXTRA[@]}" -machine pc "${CPU[@]}" -smp 2 -m 2048 -nodefaults -no-user-config -display none -no-reboot \
  -serial stdio -kernel "$W/image/vmlinuz" -initrd "$W/image/initrd.img" \
  -append "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off rdinit=/init" -device isa-debug-exit,iobase=0xf4,iosize=0x04 \
  -virtfs "local,path=$SITE,mount_tag=site,security_model=none,readonly=on,multidevs=remap" -device virtio-rng-pci </dev/null >"$LOG" 2>&1
RC=$(sed -n 's/^@@EXIT \([0-9]*\).*/\1/p' "$LOG" | tail -1 | tr -d '\r')
tr -d '\r' < "$LOG" | tail -${RDMA_LINES:-30}
[ -n "$RC" ] || { echo "the guest gave no verdict; see $LOG"; exit 1; }
exit "$RC"
