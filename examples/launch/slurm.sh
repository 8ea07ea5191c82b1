#!/bin/bash
# Trains on several nodes under SLURM, from the repository's root:
#
#   sbatch --nodes=4 examples/launch/slurm.sh examples/train.py --ckpt-dir /shared/run --tp 4
#
# Some minutes before the time is over the run saves and ends, and the job is queued again; it goes on
# from there, on as many nodes as it then gets. A node that fails queues it again, too.
#
# Settings, by environment: NPROC_PER_NODE (the GPUs of a node, else 1), MAX_RESTARTS (3, of the
# workers within one job), MAX_REQUEUES (20), LAUNCH (the folder of this file, as seen from the root).
#SBATCH --job-name=ptx
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=06:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -uo pipefail

# SLURM runs a copy of this file, so that its own place says nothing.
launch=${LAUNCH:-$SLURM_SUBMIT_DIR/examples/launch}
if [[ $# -eq 0 || ! -f $launch/node.sh ]]; then
  echo "usage: sbatch slurm.sh PROGRAM ARGUMENTS..., from the repository's root (no $launch/node.sh?)" >&2
  exit 2
fi

restarts=${SLURM_RESTART_COUNT:-0}
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  bash "$launch/node.sh" 0 \
  --nnodes="$SLURM_JOB_NUM_NODES" \
  --nproc-per-node="${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" \
  --rdzv-backend=c10d --rdzv-endpoint="$first_host:$port" --rdzv-id="$SLURM_JOB_ID-$restarts" \
  --max-restarts="${MAX_RESTARTS:-3}" --shutdown-timeout=240 \
  "$@" &
srun=$!

# Not to srun: it answers SIGTERM by killing its tasks.
terminated=
trap 'terminated=1; scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM

# A signal ends `wait` early, with its own status. When all is over the true one is still known.
while kill -0 "$srun" 2>/dev/null; do
  wait "$srun"
done
wait "$srun"
status=$?

if [[ -n $terminated ]]; then
  if ((restarts < ${MAX_REQUEUES:-20})); then
    echo "out of time, queued again (number $((restarts + 1)))"
    scontrol requeue "$SLURM_JOB_ID"
    exit $?
  fi
  echo "out of time, and queued again ${MAX_REQUEUES:-20} times already" >&2
fi
exit "$status"
