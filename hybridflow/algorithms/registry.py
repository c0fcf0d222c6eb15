"""The algorithms by name."""

from __future__ import annotations

import difflib

from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.dapo import DAPO
from hybridflow.algorithms.dpo import DPO
from hybridflow.algorithms.grpo import CISPO, DR_GRPO, GRPO, GSPO, REINFORCE_PP_BASELINE, RLOO
from hybridflow.algorithms.kto import KTO
from hybridflow.algorithms.ppo import PPO
from hybridflow.algorithms.reinforce_pp import REINFORCE_PP
from hybridflow.algorithms.remax import REMAX
from hybridflow.algorithms.reward_model import REWARD_MODEL
from hybridflow.algorithms.safe_rlhf import SAFE_RLHF
from hybridflow.algorithms.sft import SFT
from hybridflow.errors import ConfigError

_ALL = (GRPO, DR_GRPO, RLOO, REMAX, REINFORCE_PP, REINFORCE_PP_BASELINE, DAPO, GSPO, CISPO, PPO, SAFE_RLHF, SFT, DPO, KTO, REWARD_MODEL)
ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in _ALL}


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`; an unknown name raises ConfigError with the list."""
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"algorithm.name={name!r} is no algorithm{hint} Known: {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[name]
