"""Settings that work but are probably not meant: no effect, or slower than needed."""

from __future__ import annotations

from hybridflow.config import keys
from hybridflow.config.algorithm_rules import unread_settings
from hybridflow.config.batch_rules import GIB, kv_bytes_per_token, longest_sequence
from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.render import value_at
from hybridflow.config.roles import generates, has_role, model_roles
from hybridflow.config.schema import Config


def warnings(config: Config) -> list[str]:
    """What a user should know about a valid configuration."""
    found = _schedule(config) + _validation(config) + unread_settings(config) + unused_sections(config)
    return found + (_kl(config) if generates(config) else [])


def sequence_warning(config: Config, sequences_per_replica: int, facts: ModelFacts | None = None) -> list[str]:
    """What keeps the sequences of a replica from being decoded together: max_num_seqs, or a small cache."""
    limit, found = config.rollout.max_num_seqs, []
    if limit < sequences_per_replica:
        waves = -(-sequences_per_replica // limit)
        found.append(f"rollout.max_num_seqs={limit}: each replica has {sequences_per_replica} sequences a step, decoded in about {waves} "
                     f"waves; rollout.max_num_seqs={sequences_per_replica} decodes them together if the cache holds them.")
    if facts is None:
        return found
    longest, together = longest_sequence(config), min(limit, sequences_per_replica)
    held = int(config.rollout.kv_cache_gib * GIB / kv_bytes_per_token(config.rollout.tp, config.actor.model.dtype, facts) / longest)
    if 0 < held < together:
        found.append(f"rollout.kv_cache_gib={config.rollout.kv_cache_gib:g}: holds {held} sequences of the full {longest} tokens, fewer "
                     f"than the {together} decoded together; when responses are long, sequences wait or are computed again.")
    return found


def _kl(config: Config) -> list[str]:
    algorithm, found = config.algorithm, []
    if algorithm.kl_in == "loss" and algorithm.kl_coef > 0 and algorithm.kl_estimator == "k1":
        found.append("algorithm.kl_estimator=k1 with algorithm.kl_in=loss: the expected gradient of k1 is zero, so it does not hold the "
                     "policy to the reference; use k2 or k3, or algorithm.kl_in=reward.")
    return found


def _schedule(config: Config) -> list[str]:
    steps, found = config.trainer.steps, []
    if steps is not None and config.trainer.epochs != 1:
        found.append(f"trainer.epochs={config.trainer.epochs} has no effect with trainer.steps={steps}.")
    for role in model_roles(config):
        if not role.trained:
            continue
        optimizer, key = role.settings.optimizer, f"{role.section}.optimizer"
        if optimizer.schedule == "constant" and optimizer.min_lr > 0:
            found.append(f"{key}.min_lr={optimizer.min_lr} has no effect with {key}.schedule=constant.")
    return found


def unused_sections(config: Config) -> list[str]:
    """Settings of roles that the algorithm does not have."""
    default, found = Config(), []
    for section, role in (("critic", "critic"), ("cost", "cost")):
        if has_role(config, role):
            continue
        settings = [key for key in keys.leaves() if key.startswith(f"{section}.")]
        changed = [key for key in settings if value_at(config, key) != _default(config, default, key)]
        if changed:
            found.append(f"{', '.join(changed)}: no effect with algorithm.name={config.algorithm.name}, which has no {role}.")
    return found


def _default(config: Config, default: Config, key: str) -> object:
    """The value a key has when nobody set it, with what it follows."""
    value = value_at(default, key)
    while isinstance(value, str) and value.startswith("${"):
        key = value[2:-1]
        value = value_at(config, key)
    return value


def _validation(config: Config) -> list[str]:
    if config.trainer.val_interval > 0 and not config.data.val_files:
        return [f"trainer.val_interval={config.trainer.val_interval} has no effect without data.val_files."]
    return []
