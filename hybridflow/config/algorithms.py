"""What the configuration knows of each algorithm: the one list of names, and what a run of it needs.

hybridflow/algorithms/registry.py has a dataflow for each of them (a test ties the two). This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

ROLLOUT = ("actor", "reward")  # roles of an algorithm that generates and scores
CRITIC = (*ROLLOUT, "critic")


@dataclass(frozen=True)
class AlgorithmFacts:
    """roles: those every run of it holds. reference: when the frozen reference policy is held as well: "never", "always", or
    "kl" (when a KL setting asks for it). min_n: least rollout.n, and why. unread: settings of `algorithm.` it does not read.
    data: what a row of the data files is: "prompts" (responses are generated and scored), "responses", "pairs" or "labels"
    (hybridflow/data/preferences.py). head: of the trained model, "lm" or "scalar"."""

    roles: tuple[str, ...]
    data: str = "prompts"
    head: str = "lm"
    reference: str = "kl"
    min_n: int = 1
    min_n_reason: str = ""
    unread: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        return self.data == "prompts"

    @property
    def rows_per_unit(self) -> int:
        """Rows that only make sense together (the column `unit` of a batch)."""
        return 2 if self.data == "pairs" else 1

    @property
    def ignored(self) -> tuple[str, ...]:
        """`unread`, and what only algorithms with a critic, with a cost, or on preferences read."""
        return (*self.unread, *(() if "critic" in self.roles else ("lam",)), *(() if "cost" in self.roles else ("ptx_coef",)),
                *(() if self.data in ("pairs", "labels") else _OF_PREFERENCES))


_GROUP = "the baseline comes from the other responses to the prompt, so every advantage would be 0"
_REFILL = ("max_refills",)
_OF_TOKENS = ("gamma",)  # read where advantages are made token by token
_OF_POLICY = ("clip_low", "clip_high", "advantage_norm", "policy_loss", "ratio", "dual_clip", "entropy_coef", "mask_truncated",
              "overlong_buffer", "importance_correction", "kl_target")
_OF_PAIRS = ("preference_loss", "label_smoothing")
_OF_LABELS = ("desirable_weight", "undesirable_weight")
_OF_PREFERENCES = ("beta", *_OF_PAIRS, *_OF_LABELS)
_OF_ROLLOUTS = (*_OF_POLICY, *_OF_TOKENS, *_REFILL)


def _group(*unread: str) -> AlgorithmFacts:
    return AlgorithmFacts(ROLLOUT, min_n=2, min_n_reason=_GROUP, unread=unread)


ALGORITHMS: dict[str, AlgorithmFacts] = {
    "grpo": _group(*_OF_TOKENS, *_REFILL),
    "dr_grpo": _group(*_OF_TOKENS, *_REFILL),
    "rloo": _group(*_OF_TOKENS, *_REFILL),
    "remax": AlgorithmFacts(ROLLOUT, unread=("advantage_norm", *_OF_TOKENS, *_REFILL)),
    "reinforce_pp": AlgorithmFacts(ROLLOUT, unread=("advantage_norm", *_REFILL)),
    "reinforce_pp_baseline": _group(*_OF_TOKENS, *_REFILL),
    "ppo": AlgorithmFacts(CRITIC, unread=("advantage_norm", *_REFILL)),
    "safe_rlhf": AlgorithmFacts((*CRITIC, "cost", "cost_critic"), unread=("advantage_norm", *_REFILL)),
    "dapo": _group(*_OF_TOKENS),
    "gspo": _group(*_OF_TOKENS, *_REFILL),
    "cispo": _group(*_OF_TOKENS, *_REFILL),
    "sft": AlgorithmFacts(("actor",), data="responses", reference="never", unread=_OF_ROLLOUTS),
    "dpo": AlgorithmFacts(("actor",), data="pairs", reference="always", unread=("loss_aggregation", *_OF_ROLLOUTS, *_OF_LABELS)),
    "kto": AlgorithmFacts(("actor",), data="labels", reference="always", unread=("loss_aggregation", *_OF_ROLLOUTS, *_OF_PAIRS)),
    "reward_model": AlgorithmFacts(("actor",), data="pairs", head="scalar", reference="never",
                                   unread=("loss_aggregation", *_OF_ROLLOUTS, *_OF_PREFERENCES)),
}

NAMES = tuple(ALGORITHMS)
GENERATING = tuple(name for name, facts in ALGORITHMS.items() if facts.generates)
