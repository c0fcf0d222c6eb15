"""Rules between the settings of an algorithm, and what it leaves unread."""

from __future__ import annotations

from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.schema import AlgorithmConfig, Config

# settings that are read with another one only, and the value of that which turns both off
_SWITCHES = {"kl_horizon": ("kl_target", None), "importance_level": ("importance_correction", "none"),
             "overlong_penalty": ("overlong_buffer", 0)}


def algorithm_problems(config: Config) -> list[str]:
    """What cannot work; an unknown name is reported by the range check of its key."""
    facts = ALGORITHMS.get(config.algorithm.name)
    if facts is None:
        return []
    problems = _cost_problems(config) if "cost" in facts.roles else _unread_files(config)
    if not facts.generates:
        return problems + _preference_problems(config)
    return problems + _group_problems(config) + _kl_problems(config) + _loss_problems(config) + critic_warmup_problems(
        config, config.trainer.steps)


def unread_settings(config: Config) -> list[str]:
    """Settings that were changed although this algorithm does not read them."""
    facts, default = ALGORITHMS.get(config.algorithm.name), AlgorithmConfig()
    def changed(name: str) -> bool:
        return getattr(config.algorithm, name) != getattr(default, name)

    found = [f"algorithm.{name}={getattr(config.algorithm, name)} has no effect with algorithm.name={config.algorithm.name}."
             for name in (facts.ignored if facts else ()) if changed(name)]
    idle = [(name, switch) for name, (switch, off) in _SWITCHES.items() if changed(name) and getattr(config.algorithm, switch) == off]
    return found + [f"algorithm.{name}={getattr(config.algorithm, name)} has no effect without algorithm.{switch}."
                    for name, switch in idle]


def _group_problems(config: Config) -> list[str]:
    facts, n = ALGORITHMS[config.algorithm.name], config.rollout.n
    if n >= facts.min_n:
        return []
    return [f"rollout.n={n} with algorithm.name={config.algorithm.name}: {facts.min_n_reason}; use {facts.min_n} or more."]


def _kl_problems(config: Config) -> list[str]:
    algorithm, responses = config.algorithm, config.data.train_batch_size * config.rollout.n
    if algorithm.kl_target is None:
        return []
    if algorithm.kl_in != "reward":
        return [f"algorithm.kl_target={algorithm.kl_target} with algorithm.kl_in={algorithm.kl_in}: only a penalty in the reward is "
                "steered; use algorithm.kl_in=reward, or null for a fixed algorithm.kl_coef."]
    if algorithm.kl_coef == 0:
        return [f"algorithm.kl_target={algorithm.kl_target} with algorithm.kl_coef=0: steering multiplies the coefficient, which stays 0; "
                "set algorithm.kl_coef to its first value, such as 0.01."]
    if responses >= 5 * algorithm.kl_horizon:  # a fifth of it in kl_horizon responses
        return [f"algorithm.kl_horizon={algorithm.kl_horizon}: one step of {responses} responses below algorithm.kl_target="
                f"{algorithm.kl_target} would take algorithm.kl_coef to 0 or turn its sign; nearest that works: {responses // 5 + 1} "
                "(the responses of many steps are usual)."]
    return []


def _loss_problems(config: Config) -> list[str]:
    algorithm, limit, problems = config.algorithm, config.rollout.max_response_length, []
    if algorithm.overlong_buffer > limit:
        problems.append(f"algorithm.overlong_buffer={algorithm.overlong_buffer}: longer than rollout.max_response_length={limit}, so every "
                        f"response would be penalised; nearest that works: {limit}.")
    if algorithm.policy_loss == "cispo" and algorithm.dual_clip is not None:
        problems.append(f"algorithm.dual_clip={algorithm.dual_clip} with algorithm.policy_loss=cispo: its weight is bounded by "
                        "algorithm.clip_high already; use null.")
    if algorithm.policy_loss == "cispo" and algorithm.ratio == "sequence":
        problems.append("algorithm.ratio=sequence with algorithm.policy_loss=cispo: CISPO weighs tokens; use algorithm.ratio=token.")
    return problems


def critic_warmup_problems(config: Config, steps: int | None) -> list[str]:
    """Why a run of `steps` steps (None: not known yet) would not train the actor."""
    warmup, facts = config.critic.warmup_steps, ALGORITHMS.get(config.algorithm.name)
    if steps is None or facts is None or "critic" not in facts.roles or warmup < steps:
        return []
    asked = f"trainer.steps={steps}" if config.trainer.steps is not None else f"trainer.epochs={config.trainer.epochs}, {steps} steps"
    return [f"critic.warmup_steps={warmup} with {asked}: the actor would never be trained; nearest that works: {steps - 1}."]


def _unread_files(config: Config) -> list[str]:
    if not config.data.ptx_files:
        return []
    return [f"data.ptx_files={config.data.ptx_files} with algorithm.name={config.algorithm.name}: only safe_rlhf reads them; remove them."]


def _cost_problems(config: Config) -> list[str]:
    cost, algorithm, problems = config.cost, config.algorithm, []
    if cost.multiplier > cost.multiplier_max:
        problems.append(f"cost.multiplier={cost.multiplier}: above cost.multiplier_max={cost.multiplier_max}; nearest that works: "
                        f"{cost.multiplier_max}.")
    if algorithm.ptx_coef > 0 and not config.data.ptx_files:
        problems.append(f"algorithm.ptx_coef={algorithm.ptx_coef}: needs responses to keep likely; set data.ptx_files, or use 0.")
    if config.data.ptx_files and algorithm.ptx_coef == 0:
        problems.append(f"data.ptx_files={config.data.ptx_files} with algorithm.ptx_coef=0: they would not be read; set "
                        "algorithm.ptx_coef, or remove them.")
    return problems


def _preference_problems(config: Config) -> list[str]:
    algorithm, problems = config.algorithm, []
    if algorithm.name == "dpo" and algorithm.preference_loss == "ipo" and algorithm.label_smoothing > 0:
        problems.append(f"algorithm.label_smoothing={algorithm.label_smoothing} with algorithm.preference_loss=ipo: IPO has no such term; "
                        "use 0, or algorithm.preference_loss=dpo.")
    rows = algorithm.mini_batch_size or config.data.train_batch_size
    if algorithm.name == "kto" and rows < 2:
        key = "data.train_batch_size" if algorithm.mini_batch_size is None else "algorithm.mini_batch_size"
        problems.append(f"{key}={rows} with algorithm.name=kto: the reference point comes from prompts with the responses of other rows; "
                        "use 2 or more.")
    return problems
