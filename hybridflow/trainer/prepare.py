"""Everything that can go wrong before a process is started: configuration, model folder, data, reward function."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.registry import get_algorithm
from hybridflow.config.algorithm_rules import critic_warmup_problems
from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.batch_rules import optimizer_steps
from hybridflow.config.layout import GenerationLayout
from hybridflow.config.optimizer_rules import schedule_problems
from hybridflow.config.placement import Placement
from hybridflow.config.roles import generates, has_role, model_roles, uses_function
from hybridflow.config.schema import Config, RewardConfig
from hybridflow.data.preferences import DATASETS
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.sampler import PromptSampler
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, RewardError
from hybridflow.models.inspect import inspect_model
from hybridflow.rewards.check import check_reward_function
from hybridflow.rewards.verdict import field_problems
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
    ptx: PromptDataset | None  # rows of data.ptx_files
    report: Report

    def optimizer_steps(self, role: str) -> int:
        """Optimizer steps of a trained role over the whole run."""
        return optimizer_steps(self.config, role, self.steps)

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
    return prepare_checked(config, report)


def prepare_checked(config: Config, report: Report) -> Prepared:
    """The rest of the checks, for settings without problems: weight files, tokenizer, every row of the data, the functions."""
    for path in sorted({role.settings.model.path for role in model_roles(config) if not role.is_judge}):
        inspect_model(path)
    algorithm = get_algorithm(config.algorithm.name)
    tokenizer = load_tokenizer(config.actor.model)
    rl = generates(config)
    dataset = DATASETS[ALGORITHMS[algorithm.name].data]
    train = dataset(config.data.train_files, config.data, tokenizer)
    validation = dataset(config.data.val_files, config.data, tokenizer) if config.data.val_files else None
    sampler = PromptSampler(len(train), config.data.train_batch_size, config.trainer.seed, config.data.shuffle)
    ptx = DATASETS["responses"](config.data.ptx_files, config.data, tokenizer) if config.data.ptx_files else None
    if rl and uses_function(config.reward):
        _try_function(config.reward, train, validation, tokenizer, alone=not config.reward_models)
    if has_role(config, "cost") and uses_function(config.cost):
        _try_function(config.cost, train, validation, tokenizer, alone=not config.cost.models)
    _try_questions(config, train, validation)
    steps = config.trainer.steps if config.trainer.steps is not None else sampler.steps(config.trainer.epochs)
    prepared = Prepared(config, algorithm, tokenizer, train, validation, sampler, steps, ptx, report)
    problems = critic_warmup_problems(config, steps)  # without trainer.steps known from the data alone
    problems = problems or [problem for role in model_roles(config) if role.trained for problem in
                schedule_problems(f"{role.section}.optimizer", role.settings.optimizer, prepared.optimizer_steps(role.name))]
    if problems:
        raise ConfigError(problems)
    return prepared


def _try_function(settings: RewardConfig, train: PromptDataset, validation: PromptDataset | None, tokenizer: PreTrainedTokenizerBase,
                  alone: bool) -> None:
    """Here a reward or cost function that fails is a setting that cannot work: nothing was started yet. alone: nothing else scores."""
    try:
        check_reward_function(settings, train, tokenizer, alone=alone, validation=validation)
    except RewardError as error:
        raise ConfigError(str(error)) from error


def _try_questions(config: Config, train: PromptDataset, validation: PromptDataset | None) -> None:
    """Every field of a judge's prompt must be a column of every row."""
    judges = [(role.section, role.settings) for role in model_roles(config) if role.is_judge]
    problems = [problem for section, judge in judges for rows in (train, validation) if rows is not None
                for problem in field_problems(judge, section, rows.column_sets)]
    if problems:
        raise ConfigError(problems)
