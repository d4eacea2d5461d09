#!/usr/bin/env bash
# What a GPU machine shows first, in calls of less than ten minutes each; docs/gpu.md has their order and times.
#
#   PART=machine   the card, tests/gpu, gpu-check without a server
#   PART=copies    measurement 1: benchmarks.tiers --parts gpu; then gpu-check with a server
#   PART=ttft      measurements 2 and 3: stock, ours and HiCache on a model of the 8B shape
#   PART=tpot      measurement 6: decoding beside writes and loads, without a DRAM tier, and HiCache
#   PART=answers   measurement 13: answers of ours and of two cold stock servers, 100 prompts
#   PART=verdicts  judges what is in OUT
#
# OUT: a folder for results. SMALL=1: a rehearsal with a few short prompts, whose figures mean nothing.
# MODEL: a model of yours. FLAGS: for each server; HICACHE: for HiCache's; EXACT: for those of PART=answers, instead of
# --enable-deterministic-inference. PORTS: nine ports for servers begin there.
source .dev/unpack.sh || exit 1
set -u
OUT=${OUT:-.dev/log}
part=${PART:-machine} ports=${PORTS:-31001}
mkdir -p "$OUT" .dev/log
if [ -n "${SMALL:-}" ]; then
  pool=256 dram=64MiB answers_dram=64MiB hicache="--hicache-size 1"
  ttft=(--lengths 84 --rounds 1 --new 20)
  tpot=(--streams 2 --tokens 3 --prompt 20 --rounds 1) load=(--load 84)
  answers=(--prompts 2 --longest 84 --tokens 4)
else
  pool=70000 dram=24GiB answers_dram=4GiB hicache="--hicache-size 24"
  ttft=() tpot=() load=(--load 8192) answers=()
fi
read -ra flags <<<"${FLAGS:-}"
read -ra exact <<<"${EXACT---enable-deterministic-inference}"
read -ra hicache <<<"$hicache --hicache-write-policy write_through ${HICACHE:-}"
hicache=(--enable-hierarchical-cache "${hicache[@]}")
ours=(--radix-cache-backend global --kv-load-policy always)

running= failed=0
measure() { python3 "$@" || failed=1; }  # the others are worth having
serve() {  # NAME NUMBER FLAGS...; its address is $url
  running=$1 url=http://127.0.0.1:$((ports + $2))
  .dev/serve.sh "$1" $((ports + $2)) --model-path "$model" --max-total-tokens $pool --enable-cache-report \
    "${@:3}" ${flags[@]+"${flags[@]}"} || exit 1
}
stock() { STOCK=1 serve "$@"; }
alive() {  # SESSION; what has ended and was not waited for is not alive
  cat /proc/[0-9]*/stat 2>/dev/null | sed 's/.*) //' | awk -v session="$1" '$4 == session && $1 != "Z" { found = 1 } END { exit !found }'
}
end() {  # the server that runs; the next one needs its memory
  [ -n "$running" ] || return 0
  local pid; pid=$(cat .dev/log/"$running".pid); running=
  kill "$pid" 2>/dev/null
  for _ in $(seq 60); do alive "$pid" || return 0; sleep 0.5; done
  kill -9 -- -"$pid" 2>/dev/null
}
finish() { end; cp .dev/log/*.log "$OUT"/ 2>/dev/null; true; }
trap finish EXIT
make_model() {  # SHAPE [--no-weights]
  model=${MODEL:-.dev/m-$1}
  [ -e "$model/config.json" ] || python3 -m sglang_ext.gpu_check.models "$1" "$model" "${@:2}" || exit 1
}

case $part in
machine)
  nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv,noheader | tee "$OUT/card.txt"
  free -g | sed -n 2p; nvcc --version | sed -n 4p; c++ --version | sed -n 1p
  # pyproject.toml asks for pytest-asyncio, which such a machine may lack
  python3 -m pytest -q -c /dev/null --rootdir=. --confcutdir=tests/gpu -p no:cacheprovider --import-mode=importlib tests/gpu
  python3 -m sglang_ext.cli gpu-check --quick --json | tee "$OUT/gpu-check.json";;
copies)
  PYTHONPATH=$SITE:$PWD python3 -m benchmarks.tiers --parts gpu --quick | tee "$OUT/copies.txt"
  python3 -m sglang_ext.cli gpu-check --json | tee "$OUT/gpu-check-server.json";;
ttft)
  make_model 8b --no-weights; [ -n "${MODEL:-}" ] || flags+=(--load-format dummy)
  stock stock 0
  measure .dev/ask.py "$url" "$OUT/ttft-stock.json" --pool $pool --hbm-only ${ttft[@]+"${ttft[@]}"}; end
  serve ours 1 "${ours[@]}" --kv-dram-size $dram
  measure .dev/ask.py "$url" "$OUT/ttft-ours.json" --pool $pool ${ttft[@]+"${ttft[@]}"}; end
  stock hicache 2 "${hicache[@]}"
  measure .dev/ask.py "$url" "$OUT/ttft-hicache.json" --pool $pool ${ttft[@]+"${ttft[@]}"};;
tpot)
  make_model 8b --no-weights; [ -n "${MODEL:-}" ] || flags+=(--load-format dummy)
  serve off 3 "${ours[@]}" --kv-dram-size 0
  measure .dev/decode.py "$url" "$OUT/tpot-off.json" ${tpot[@]+"${tpot[@]}"}; end
  serve ours 4 "${ours[@]}" --kv-dram-size $dram
  measure .dev/decode.py "$url" "$OUT/tpot-ours.json" --pool $pool "${load[@]}" ${tpot[@]+"${tpot[@]}"}; end
  stock hicache 5 "${hicache[@]}"
  measure .dev/decode.py "$url" "$OUT/tpot-hicache.json" --pool $pool "${load[@]}" ${tpot[@]+"${tpot[@]}"};;
answers)
  make_model 1b; flags+=(${exact[@]+"${exact[@]}"})
  for run in 1 2; do
    stock stock-$run $((5 + run))
    measure .dev/same.py "$url" "$OUT/answers-stock-$run.json" ${answers[@]+"${answers[@]}"}; end
  done
  serve ours 8 "${ours[@]}" --kv-dram-size $answers_dram
  measure .dev/same.py "$url" "$OUT/answers-ours.json" --pool $pool \
    --damage "$(cat .dev/log/ours.pid)" ${answers[@]+"${answers[@]}"};;
verdicts)
  python3 .dev/verdicts.py "$OUT" || exit 1;;
*) echo "there is no part $part"; exit 2;;
esac
exit $failed
