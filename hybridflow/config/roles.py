"""Which roles a run has, as its settings say."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from hybridflow.config.algorithms import ALGORITHMS, GENERATING
from hybridflow.config.reward_models import COST, REWARD, JudgeConfig, RewardModelConfig, Scorer, ScorerConfig, valid_scorers
from hybridflow.config.schema import ActorConfig, Config, CriticConfig, PlacedConfig, RewardConfig


def generates(config: Config) -> bool:
    """True if the algorithm needs a rollout engine and rewards."""
    return config.algorithm.name in GENERATING


def uses_reference(config: Config) -> bool:
    """True if the run holds a frozen reference policy."""
    facts = ALGORITHMS.get(config.algorithm.name)
    wanted = facts.reference if facts else "never"
    return wanted == "always" or (wanted == "kl" and (config.algorithm.kl_coef > 0 or config.algorithm.track_kl))


def has_role(config: Config, name: str) -> bool:
    """True if every run of the algorithm holds that role."""
    facts = ALGORITHMS.get(config.algorithm.name)
    return facts is not None and name in facts.roles


@dataclass(frozen=True, eq=False)
class ModelRole:
    """A role with a model on the ranks. section: where its settings are."""

    name: str
    section: str
    settings: ActorConfig | PlacedConfig

    @property
    def trained(self) -> bool:
        return hasattr(self.settings, "optimizer")

    @property
    def scalar(self) -> bool:
        """True if its output is one number per token, not a distribution."""
        return isinstance(self.settings, (CriticConfig, RewardModelConfig))

    @property
    def evaluation_budget(self) -> int:
        """Token budget of a micro-batch without gradients."""
        if self.is_judge:
            return self.settings.max_num_batched_tokens
        return next(value for name, value in vars(self.settings).items() if name.endswith("_max_tokens_per_micro_batch"))

    @property
    def reads_tokens(self) -> bool:
        """Whether it must know the actor's tokens; a reward model may have a tokenizer of its own."""
        return not isinstance(self.settings, ScorerConfig)

    @property
    def is_judge(self) -> bool:
        """Whether vLLM runs it, on text of another length than the rollout's."""
        return isinstance(self.settings, JudgeConfig)

    @property
    def own_ranks(self) -> int | None:
        """Ranks that this role has alone; None where it lives on the actor's."""
        return self.settings.ranks if isinstance(self.settings, PlacedConfig) else None


def model_roles(config: Config) -> list[ModelRole]:
    """The roles of the run that have a model; the actor comes first."""
    roles = [ModelRole("actor", "actor", config.actor)]
    if uses_reference(config):
        roles.append(ModelRole("reference", "reference", config.reference))
    models: list[Scorer] = valid_scorers(config, REWARD) if generates(config) else []
    models += valid_scorers(config, COST) if has_role(config, "cost") else []
    roles += [ModelRole(scorer.role, scorer.section, scorer.settings) for scorer in models]
    if has_role(config, "critic"):
        roles.append(ModelRole("critic", "critic", config.critic))
    if has_role(config, "cost_critic"):
        roles.append(ModelRole("cost_critic", "cost.critic", config.cost.critic))
    return roles


def uses_function(settings: RewardConfig) -> bool:
    """True if a reward (or cost) function scores; False where models do alone."""
    return settings.function not in (MISSING, "")
