"""Which token ids end a response: those of the model folder plus those of the configuration."""

from __future__ import annotations

import json
from pathlib import Path

from hybridflow.config.schema import RolloutConfig
from hybridflow.errors import ModelError


def eos_token_ids(model_path: str) -> list[int]:
    """End-of-sequence ids of a model folder: generation_config.json where it names some, else config.json.

    Raises ModelError if the folder has no readable config.json.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if not file.exists():
            continue
        try:
            eos = json.loads(file.read_text()).get("eos_token_id")
        except json.JSONDecodeError as error:
            raise ModelError(f"{file} is not valid JSON: {error}") from error
        if eos is not None:
            return list(eos) if isinstance(eos, list) else [eos]
    if not (Path(model_path) / "config.json").exists():
        raise ModelError(f"no config.json in {model_path}: actor.model.path must be a Hugging Face model folder")
    return []


def stop_token_ids(model_path: str, config: RolloutConfig) -> tuple[int, ...]:
    """All ids that end a response: rollout.stop_token_ids, and the model's own unless rollout.ignore_eos."""
    own = [] if config.ignore_eos else eos_token_ids(model_path)
    return tuple(dict.fromkeys([*own, *config.stop_token_ids]))
