#!/bin/bash
# The paper's run as a job of Slurm, on a node with eight GPUs: `sbatch examples/slurm.sh`. Submitted again, it resumes.
#
# Beforehand, on a node with a network, in $SCRATCH/topr, with HF_HOME as below: the installation of docs/gpu.md;
# `python train_gsm8k.py paper --dry-run`, which downloads the data set; and `hf download`, for the model.
#SBATCH --nodes=1 --ntasks=1 --gpus-per-node=8 --cpus-per-task=64 --mem=300G --time=08:00:00
#SBATCH --signal=B:TERM@120
export HF_HOME=$SCRATCH/hf HF_HUB_OFFLINE=1         # models and data; the nodes that compute have no network
export VLLM_CACHE_ROOT=$SCRATCH/vllm                # what vLLM compiles: a home folder may be too small
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100           # seconds in which a checkpoint can be finished
export OMP_NUM_THREADS=8
cd "$SCRATCH/topr" || exit
. .venv/bin/activate

trap 'kill -TERM $!' TERM                           # 120 seconds before the end, by --signal
torchrun --standalone --nproc-per-node 8 train_gsm8k.py paper --out "$SCRATCH/paper" "$@" &
wait $! || wait $!                                  # the signal ends the first wait, and the run needs the second
