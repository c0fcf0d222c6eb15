"""What a run steers from step to step, beside its weights: written into every checkpoint, read with trainer.state_path.

    <checkpoint>/hybridflow/state.safetensors

Tensors are stored as such; everything else is JSON in the file's metadata, which gives every number back as it was.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from hybridflow.algorithms.base import Flow
from hybridflow.algorithms.registry import get_algorithm
from hybridflow.config.file_rules import STATE_FILE
from hybridflow.config.reward_models import REWARD, scorers
from hybridflow.config.schema import Config
from hybridflow.errors import ConfigError
from hybridflow.rewards.sources import distils, normalises

logger = logging.getLogger(__name__)

FORMAT, VERSION = "hybridflow training state", "1"

Numbers = dict[str, dict[str, float]]


@dataclass(frozen=True)
class TrainingState:
    """controllers: by name ("kl", "multiplier"). normalizers: statistics of scores, by reward model with normalize=running. heads:
    the light heads of distilled reward models, whose values are numbers, mappings of numbers and tensors. step: steps done."""

    algorithm: str
    step: int
    controllers: Numbers
    normalizers: Numbers
    heads: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, flow: Flow, step: int) -> TrainingState:
        """The state of a run after `step` steps."""
        return cls(flow.config.algorithm.name, step, flow.state_dict(), **flow.reward.state_dict())

    def restore(self, flow: Flow) -> None:
        """Go on with it. The settings of the run stay as they are; `state_problems` must have found nothing."""
        flow.load_state_dict(self.controllers)
        flow.reward.load_state_dict({"normalizers": self.normalizers, "heads": self.heads})
        logger.info("the run goes on with the state of step %d of %s: %s", self.step, self.algorithm, flow.state_dict())

    def to_bytes(self) -> bytes:
        """The content of STATE_FILE."""
        tensors: dict[str, torch.Tensor] = {}
        heads: dict[str, dict[str, Any]] = {name: {} for name in self.heads}
        for name, part, value in ((name, part, value) for name, head in self.heads.items() for part, value in head.items()):
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{part}"] = value.contiguous()
            else:
                heads[name][part] = value
        state = vars(self) | {"heads": heads}
        return save(tensors, metadata={"format": FORMAT, "version": VERSION, "state": json.dumps(state, allow_nan=False)})

    @classmethod
    def read(cls, checkpoint: str) -> TrainingState:
        """The state in a checkpoint's folder. Raises ConfigError naming trainer.state_path where it is missing, damaged, or of a version
        this one does not know."""
        path, place = Path(checkpoint) / STATE_FILE, f"trainer.state_path={checkpoint}"
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{place}: {path} cannot be read ({error}); name the checkpoint of a run that generates") from error
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
            found = f"{metadata.get('format')!r}, version {metadata.get('version')!r}"
            raise ConfigError(f"{place}: {path} is {found}, and what can be read here is {FORMAT!r}, version {VERSION!r}; use null, or the "
                              "hybridflow that wrote it")
        try:
            state = cls(**json.loads(metadata["state"]))
            for key, value in tensors.items():
                name, _, part = key.partition("/")
                state.heads[name][part] = value
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{place}: {path} is damaged ({type(error).__name__}: {error}); name another checkpoint, or use null to "
                              "start anew") from error
        return state


def read_state(config: Config) -> TrainingState:
    """What trainer.state_path names. Raises ConfigError where it cannot be read, or lacks something this run steers."""
    state = TrainingState.read(config.trainer.state_path)
    models = scorers(config, REWARD).values()
    wanted = {
        "controllers": list(get_algorithm(config.algorithm.name).controllers(config)),
        "normalizers": [scorer.name for scorer in models if normalises(scorer.settings)],
        "heads": [scorer.name for scorer in models if distils(scorer.settings)],
    }
    absent = [f"{kind}: {name}" for kind, names in wanted.items() for name in names if name not in getattr(state, kind)]
    if absent:
        raise ConfigError(f"trainer.state_path={config.trainer.state_path}: it holds no state of {', '.join(absent)} (it is of a run of "
                          f"{state.algorithm}); name the checkpoint of a run with the same, or use null to start anew")
    return state
