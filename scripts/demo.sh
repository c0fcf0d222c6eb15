#!/usr/bin/env bash
# The main job on a small scale, no download but packages: makes a character-level model, teaches it two-number addition by
# SFT on Megatron (4 CPU ranks, TP2 x DP2), then improves it with GRPO (generation by vLLM, TP1 x DP4).
#
#   scripts/demo.sh [OVERRIDES of the GRPO run]      e.g. actor.parallel.pp=2   (training TP2 x PP2)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/setup_env.sh
. .venv/bin/activate
unset PYTHONDONTWRITEBYTECODE  # every rank imports torch, Megatron and vLLM: twice as slow without compiled modules
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

echo "demo: 1/3 model and data"
python scripts/prepare_addition.py --out data/addition
echo "demo: 2/3 warm start (SFT)"
torchrun --nproc-per-node=1 launch/train.py experiment=addition_sft trainer.overwrite=true
echo "demo: 3/3 GRPO"
torchrun --nproc-per-node=1 launch/train.py experiment=addition_grpo trainer.overwrite=true "$@"
