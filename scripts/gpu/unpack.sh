# source .dev/unpack.sh   (on the GPU machine, in the repository's root; again in each shell)
#
# SITE: the folder of the packages; .dev/site unless set.
set -u
SITE=${SITE:-$PWD/.dev/site}
if [ ! -e "$SITE/.ready" ]; then
  mkdir -p "$SITE"
  python3 -c "import sys, tarfile; tarfile.open('.dev/site.tar.xz', 'r:xz').extractall(sys.argv[1], filter='fully_trusted')" "$SITE" || return 1
  # 3,500 modules: compiled once, on all cores, not by each of a server's processes.
  PYTHONDONTWRITEBYTECODE= python3 -m compileall -q -j 0 "$SITE" >/dev/null 2>&1
  touch "$SITE/.ready"
fi
# In a checkout, `import sglang_ext` would find the folder here, which lacks patches and router.
export PYTHONSAFEPATH=1 PYTHONPATH=$SITE PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1   # an older one than SGLang asks for, which fits this torch
export TRITON_CACHE_DIR=$PWD/.dev/triton SGLANG_JIT_CACHE_DIR=$PWD/.dev/jit
if command -v nvcc >/dev/null; then
  export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
fi
set +u
