#!/usr/bin/env bash
# serve.sh NAME PORT FLAGS...: a server in a session of its own, which outlasts the call; returns when it answers.
# Ended by `kill $(cat .dev/log/NAME.pid)`; its log is .dev/log/NAME.log.
source .dev/unpack.sh || exit 1
name=$1 port=$2; shift 2
mkdir -p .dev/log
setsid python3 -m sglang_ext.launch_server --host 127.0.0.1 --port "$port" \
  --attention-backend triton --sampling-backend pytorch "$@" >.dev/log/"$name".log 2>&1 </dev/null &
echo $! >.dev/log/"$name".pid
for i in $(seq 480); do
  python3 -S -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/health', timeout=5)" 2>/dev/null && { echo "$name answers after $((i / 2)) s"; exit 0; }
  kill -0 "$(cat .dev/log/"$name".pid)" 2>/dev/null || break
  sleep 0.5
done
echo "$name did not start"; grep -v server_args= .dev/log/"$name".log | tail -40; exit 1
