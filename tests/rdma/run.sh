#!/bin/bash
# The verbs transport's tests in a guest with a real (software) RDMA device; no privileges, nothing installed.
# usage: run.sh [PYTHON]    exit: 0 passed, 77 skipped (the line says why), else failed
#   RDMA_CACHE: see prepare.sh     RDMA_LIMIT: seconds that the guest may print nothing; on a busy machine it is slow
#   RDMA_PYTEST: more arguments for pytest, such as -k scattered
set -u
HERE=$(cd "$(dirname "$0")" && pwd); PYTHON=${1:-python3}; LIMIT=${RDMA_LIMIT:-900}
W=${RDMA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-ext/rdma}
PREPARED=$(bash "$HERE/prepare.sh" "$PYTHON" "$W/site") || { status=$?; tail -1 <<< "$PREPARED"; exit $status; }
mapfile -t QEMU <<< "$PREPARED"
LOG=$W/guest.log
"${QEMU[@]}" -serial stdio \
  -append "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off no_timer_check rdinit=/init" </dev/null >"$LOG" 2>&1 &
GUEST=$!
trap 'kill "$GUEST" 2>/dev/null' EXIT
while kill -0 "$GUEST" 2>/dev/null; do
  [ $(($(date +%s) - $(stat -c %Y "$LOG"))) -lt "$LIMIT" ] || { kill "$GUEST"; sleep 5; kill -9 "$GUEST" 2>/dev/null; break; }
  sleep 1
done
wait "$GUEST" 2>/dev/null
RC=$(sed -n 's/^@@EXIT \([0-9]*\).*/\1/p' "$LOG" | tail -1 | tr -d '\r')
tr -d '\r' < "$LOG" | tail -${RDMA_LINES:-30}
[ -n "$RC" ] || { echo "the guest gave no verdict; see $LOG"; exit 1; }
exit "$RC"
