#!/usr/bin/env bash
# serve.sh NAME PORT FLAGS...: a server in a session of its own, which outlasts the call; returns when it answers.
# STOCK=1: SGLang's, without the plugin. WAIT: seconds to wait for it.
# Ended by `kill $(cat .dev/log/NAME.pid)`; its log is .dev/log/NAME.log.
source .dev/unpack.sh || exit 1
name=$1 port=$2; shift 2
module=sglang_ext.launch_server
if [ -n "${STOCK:-}" ]; then
  module=sglang.launch_server
  export SGLANG_PLUGINS=none   # a list of the plugins to load
fi
mkdir -p .dev/log
setsid python3 -m $module --host 127.0.0.1 --port "$port" \
  --attention-backend triton --sampling-backend pytorch "$@" >.dev/log/"$name".log 2>&1 </dev/null &
echo $! >.dev/log/"$name".pid
begin=$SECONDS
while ((SECONDS - begin < ${WAIT:-240})); do
  python3 -S -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/health', timeout=5)" 2>/dev/null && { echo "$name answers after $((SECONDS - begin)) s"; exit 0; }
  kill -0 "$(cat .dev/log/"$name".pid)" 2>/dev/null || break
  sleep 0.5
done
echo "$name did not start"; grep -v server_args= .dev/log/"$name".log | tail -40; exit 1
