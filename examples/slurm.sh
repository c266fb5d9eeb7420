#!/bin/bash
# maskaq on SLURM: sbatch examples/slurm.sh
#
# The first node leads: its GPUs calibrate together, under torchrun. All other nodes help with the images by
# `maskaq work`, one process for each GPU, and leave by themselves when the run is finished. A helper that is killed
# costs its current part of the images, nothing else. After a requeue the run goes on where it was; at the end of --time
# SLURM requeues nothing: submit the same again.
#
# RUN has to be on a file system that all nodes see (docs/SCALING.md says what it must offer), and maskaq, torch and
# timm have to be the same versions on all nodes: a worker of another version is refused.

#SBATCH --job-name=maskaq
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@60

set -euo pipefail

RUN=${RUN:-$SLURM_SUBMIT_DIR/runs/deit_b-w4a4}
MODEL=${MODEL:-deit_base_patch16_224}
OPTIONS=${OPTIONS:---bits w4a4 --recipe paper}
export RUN MODEL OPTIONS
export GPUS=${SLURM_GPUS_ON_NODE:-8}
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / GPUS))
# Without this, torchrun cannot go on after a kill of rank 0 (pytorch/pytorch#167288).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# srun has not taken the CPUs from sbatch since 22.05.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 bash -c '
  if [ "$SLURM_NODEID" = 0 ]; then
    exec torchrun --standalone --nproc-per-node "$GPUS" --max-restarts 10 \
      -m maskaq quantize $MODEL $OPTIONS --out "$RUN"
  fi
  for gpu in $(seq 0 $((GPUS - 1))); do
    maskaq work "$RUN" --device "cuda:$gpu" --wait 900 &
  done
  wait
'
