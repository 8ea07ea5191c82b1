#!/bin/bash
# Runs torchrun on one node, for slurm.sh and pbs.sh; once per node.
#
#   node.sh STOP_AT TORCHRUN_ARGUMENTS... PROGRAM ARGUMENTS...
#
# STOP_AT: second since 1970 at which the run is told to save and end; 0: never.
#
# SIGTERM goes to the workers, past torchrun: told itself, torchrun would kill them after a time and
# report a failure. Workers that save and exit 0 make torchrun exit 0.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

stop_at=$1
shift

if [[ -f .venv/bin/activate ]]; then
  # shellcheck disable=SC1091  # may not be there
  source .venv/bin/activate
fi

torchrun "$@" &
torchrun=$!

timer=
trap '[[ -z $timer ]] || pkill -P "$timer"' EXIT # ends its sleep, and so itself
trap 'pkill -TERM -P "$torchrun"' TERM

if ((stop_at > 0)); then
  left=$((stop_at - $(date +%s)))
  (sleep "$((left > 0 ? left : 0))" && kill -TERM $$) &
  timer=$!
fi

# A signal ends `wait` early, with its own status. When all is over the true one is still known.
while kill -0 "$torchrun" 2>/dev/null; do
  wait "$torchrun"
done
wait "$torchrun"
