#!/bin/bash
# Trains on several nodes under PBS, from the repository's root:
#
#   qsub -v TRAIN='examples/train.py --ckpt-dir /shared/run --tp 4' examples/launch/pbs.sh
#
# Some minutes before the walltime is over the run saves and ends, and a new job goes on from there.
# What `qsub` is given besides -v isn't repeated for that job: put it into the lines below, or in QSUB.
#
# Settings, by -v too: NPROC_PER_NODE (4), MAX_RESTARTS (3, of the workers within one job), MAX_JOBS
# (20, one after the other), MARGIN (300 seconds for saving), WALLTIME (seconds, if qstat doesn't tell),
# MPIEXEC (how it is told one process per node: "--ppn 1" for MPICH and PALS, "--map-by ppr:1:node"
# for Open MPI), QSUB (more options for the next job).
#PBS -N ptx
#PBS -l select=2:ncpus=32:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=06:00:00
#PBS -j oe
set -uo pipefail

cd "$PBS_O_WORKDIR" || exit 1
launch=$PBS_O_WORKDIR/examples/launch
if [[ -z ${TRAIN:-} || ! -f $launch/node.sh ]]; then
  echo "usage: qsub -v TRAIN='PROGRAM ARGUMENTS...' pbs.sh, from the repository's root (no $launch/node.sh?)" >&2
  exit 2
fi
read -r -a program <<<"$TRAIN" # split at blanks: no argument can hold one
read -r -a per_node <<<"${MPIEXEC:---ppn 1}"
read -r -a options <<<"${QSUB:-}"

# "    Resource_List.walltime = 06:00:00"
clock=$(qstat -f "$PBS_JOBID" 2>/dev/null | sed -n 's/^ *Resource_List.walltime = //p')
IFS=: read -r hours minutes seconds <<<"${clock:-0:0:0}"
walltime=${WALLTIME:-$((10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))}
margin=${MARGIN:-300}
stop_at=0
if ((walltime > margin)); then
  stop_at=$(($(date +%s) + walltime - margin))
else
  echo "walltime unknown or below $margin s: only --save-interval saves" >&2
fi

hosts=$(mktemp)
trap 'rm -f "$hosts"' EXIT
awk '!seen[$0]++' "$PBS_NODEFILE" >"$hosts" # one line per process otherwise
nodes=$(wc -l <"$hosts")
first_host=$(head -n 1 "$hosts")
number=${PBS_JOBID%%[!0-9]*}
port=$((20000 + number % 10000))

mpiexec -n "$nodes" "${per_node[@]}" --hostfile "$hosts" \
  bash "$launch/node.sh" "$stop_at" \
  --nnodes="$nodes" --nproc-per-node="${NPROC_PER_NODE:-4}" \
  --rdzv-backend=c10d --rdzv-endpoint="$first_host:$port" --rdzv-id="$number" \
  --max-restarts="${MAX_RESTARTS:-3}" --shutdown-timeout=240 \
  "${program[@]}"
status=$?

if ((stop_at > 0 && $(date +%s) >= stop_at)); then
  export JOBS=$((${JOBS:-1} + 1))
  if ((JOBS <= ${MAX_JOBS:-20})); then
    echo "out of time, job number $JOBS goes on"
    # By name alone, qsub takes values from the environment, commas and all.
    set_names=TRAIN,JOBS
    for name in NPROC_PER_NODE MAX_RESTARTS MAX_JOBS MARGIN WALLTIME MPIEXEC QSUB; do
      if [[ -n ${!name:-} ]]; then set_names+=,$name; fi
    done
    qsub "${options[@]}" -v "$set_names" "$launch/pbs.sh"
    exit $?
  fi
  echo "out of time, and ${MAX_JOBS:-20} jobs have run already" >&2
fi
exit "$status"
