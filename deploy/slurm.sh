#!/bin/bash
# One rank for each GPU, on as many nodes as asked for:
#   sbatch --nodes=2 deploy/slurm.sh cifar10-resnet20 dgc ramp5 --data /path/to/data
# Rank 0 is on the first node; srun tells every rank where it stands. A job that is requeued goes on from its last
# checkpoint, since --resume starts from the beginning where there is none.
#SBATCH --job-name=gradwire
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --output=%x-%j.out

set -euo pipefail

if [ "$#" -eq 0 ]; then
    echo "usage: sbatch [options] deploy/slurm.sh RECIPE... [options of gradwire train]" >&2
    exit 2
fi

# gpus-per-task shows each rank one GPU, which it calls 0.
srun --kill-on-bad-exit=1 gradwire train "$@" --devices 0 --resume --runs "${GRADWIRE_RUNS:-$SLURM_SUBMIT_DIR/runs}"
