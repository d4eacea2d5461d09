#!/usr/bin/env bash
# What a GPU machine shows first, in calls of less than ten minutes. PART=a|b|c. OUT: a folder for results.
#
# a: the machine, tests/gpu, gpu-check without a server. b: gpu-check with a server; TTFT from each tier, ours and
# HiCache's, on a model of the 8B shape. c: benchmarks.tiers --parts gpu.
source .dev/unpack.sh || exit 1
set -u
OUT=${OUT:-.dev/log}
mkdir -p "$OUT" .dev/log
nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader
free -g | sed -n 2p; nvcc --version | sed -n 4p; c++ --version | sed -n 1p
case ${PART:-a} in
a) # pyproject.toml asks for pytest-asyncio, which such a machine may lack
   python3 -m pytest -q -c /dev/null --rootdir=. --confcutdir=tests/gpu -p no:cacheprovider --import-mode=importlib tests/gpu
   python3 -m sglang_ext.cli gpu-check --quick --json | tee "$OUT/gpu-check.json";;
b) python3 -m sglang_ext.cli gpu-check --json | tee "$OUT/gpu-check-server.json"
   python3 -m sglang_ext.gpu_check.models 8b .dev/m-8b --no-weights
   .dev/serve.sh ours 31002 --model-path .dev/m-8b --load-format dummy --max-total-tokens 70000 --enable-cache-report \
     --radix-cache-backend global --kv-dram-size 24GiB --kv-load-policy always || exit 1
   python3 .dev/ask.py http://127.0.0.1:31002 "$OUT/ours.json" --pool 70000; kill "$(cat .dev/log/ours.pid)"; sleep 5
   .dev/serve.sh hicache 31003 --model-path .dev/m-8b --load-format dummy --max-total-tokens 70000 --enable-cache-report \
     --enable-hierarchical-cache --hicache-size 24 || exit 1
   python3 .dev/ask.py http://127.0.0.1:31003 "$OUT/hicache.json" --pool 70000; kill "$(cat .dev/log/hicache.pid)";;
c) PYTHONPATH=$SITE:$PWD python3 -m benchmarks.tiers --parts gpu --quick;;
esac
cp .dev/log/*.log "$OUT"/ 2>/dev/null || true
