#!/usr/bin/env bash
# Sets up the environment if needed, checks the style, and runs the tests; arguments go to pytest.
#
#   scripts/test.sh                      everything but the tests marked slow (gpu tests skip themselves without a GPU)
#   scripts/test.sh -m slow              those: run by hand before a release
#   scripts/test.sh tests/reshard -k plan
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
bash scripts/setup_env.sh
. .venv/bin/activate
unset PYTHONDONTWRITEBYTECODE  # every rank imports torch, Megatron and vLLM: twice as slow without compiled modules

# Tests start several ranks on few cores, and must never reach for a model hub.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1

ruff check .
python -m pytest -q --durations=15 -m "not slow" "$@"
