"""Everything that can go wrong before a process is started: configuration, model folder, data, reward function."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.registry import get_algorithm
from hybridflow.config.layout import GenerationLayout
from hybridflow.config.placement import Placement
from hybridflow.config.roles import generates, model_roles, uses_function
from hybridflow.config.schema import Config
from hybridflow.data.preferences import DATASETS
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.sampler import PromptSampler
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, RewardError
from hybridflow.models.inspect import inspect_model
from hybridflow.rewards.check import check_reward_function
from hybridflow.trainer.check import Report, check


@dataclass(frozen=True)
class Prepared:
    """A run that has passed every check that needs no worker."""

    config: Config
    algorithm: Algorithm
    tokenizer: PreTrainedTokenizerBase
    train: PromptDataset
    validation: PromptDataset | None
    sampler: PromptSampler
    steps: int
    optimizer_steps: int
    report: Report

    @property
    def placement(self) -> Placement:
        """Pools and worker groups of the roles that have a model."""
        return self.report.placement

    @property
    def generation(self) -> GenerationLayout | None:
        return self.report.generation


def prepare(config: Config, world: int) -> Prepared:
    """Check the run for `world` ranks and load its data. Raises ConfigError (every problem at once), DataError or ModelError."""
    report = check(config, world)
    if report.problems:
        raise ConfigError(report.problems)
    for path in sorted({role.settings.model.path for role in model_roles(config) if not role.is_judge}):
        inspect_model(path)
    algorithm = get_algorithm(config.algorithm.name)
    tokenizer = load_tokenizer(config.actor.model)
    rl = generates(config)
    dataset = DATASETS["prompts" if rl else "responses"]
    train = dataset(config.data.train_files, config.data, tokenizer)
    validation = dataset(config.data.val_files, config.data, tokenizer) if config.data.val_files else None
    sampler = PromptSampler(len(train), config.data.train_batch_size, config.trainer.seed, config.data.shuffle)
    if rl and uses_function(config):
        _try_reward_function(config, train, tokenizer)
    steps = config.trainer.steps if config.trainer.steps is not None else sampler.steps(config.trainer.epochs)
    return Prepared(config, algorithm, tokenizer, train, validation, sampler, steps, steps * updates_per_step(config), report)


def _try_reward_function(config: Config, train: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    """Here a reward function that fails is a setting that cannot work: nothing was started yet."""
    try:
        check_reward_function(config.reward, train, tokenizer, alone=not config.reward_models)
    except RewardError as error:
        raise ConfigError(str(error)) from error


def updates_per_step(config: Config) -> int:
    """Optimizer steps of one rollout: update_epochs passes over its mini-batches."""
    rows = config.data.train_batch_size * (config.rollout.n if generates(config) else 1)
    return config.algorithm.update_epochs * math.ceil(rows / (config.algorithm.mini_batch_size or rows))
