"""What goes into the folder of a trained model beside the weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hybridflow.config.schema import ModelConfig
from hybridflow.data.tokenizer import load_tokenizer


def complete(model: ModelConfig, files: Mapping[str, bytes], folder: Path) -> None:
    """Adds `files` (path in the folder -> content), and the tokenizer where the run's is not the one that came with the weights."""
    if model.tokenizer_path or model.chat_template:
        load_tokenizer(model).save_pretrained(folder)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
