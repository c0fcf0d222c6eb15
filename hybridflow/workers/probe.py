"""The probe: fixed tokens whose log-probs trainer and generation engine must agree on after a sync.

It compares what the two engines compute, not what was copied: a tensor that was lost, swapped or laid out wrongly shows,
as does a model that they understand differently. When it fails, checksums say which tensor differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import WeightsDifferError
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.verify import differing
from hybridflow.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from hybridflow.engine.megatron import MegatronEngine

ROWS, TOKENS = 4, 32
# Mean |rollout - trainer| may be this much of 1 + mean |log-prob|: rounding grows with the logits. The two engines differ by
# 1e-7 in float32 on CPU and by 2 % of a nat in bfloat16 on one H200, where log-probs of random tokens are about -12.
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}


def probe_tokens(vocab: int, max_tokens: int) -> list[list[int]]:
    """ROWS rows of the same tokens in every run, spread over the vocabulary."""
    length = min(TOKENS, max_tokens - 1)  # vLLM samples one token more
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (ROWS, length), generator=generator).tolist()


def probe_bound(dtype: str, log_probs: torch.Tensor) -> float:
    """The largest mean gap that rounding explains, for log-probs of this size."""
    return BOUNDS[dtype] * (1.0 + float(log_probs.abs().mean()))


class Probe:
    """Compares at the first sync and every `interval` syncs (0: never). dtype: of both engines, a key of BOUNDS.

    engine: None on ranks that only generate; rollout: None on ranks that only train. The former hear from the latter, over the
    resharder's group. vocab, max_tokens: token ids of the model, and tokens that a row may have in both engines; where that is one
    prompt token and one response token there is nothing to compare.
    """

    def __init__(self, engine: MegatronEngine | None, rollout: RolloutEngine | None, resharder: Resharder, *, vocab: int, max_tokens: int,
                 interval: int, dtype: str) -> None:
        self.engine, self.rollout, self.resharder, self.interval, self.dtype = engine, rollout, resharder, interval, dtype
        self.rows = probe_tokens(vocab, max_tokens)
        self._syncs = 0

    def after_sync(self, version: int) -> dict[str, float]:
        """Count a sync and compare if it is due: {"probe_gap": mean |gap|}, {} if it is not, or on ranks that do not generate.
        Collective; phase generate.

        Raises WeightsDifferError on every rank when any rank's gap exceeds the bound.
        """
        due = self.interval > 0 and self._syncs % self.interval == 0 and len(self.rows[0]) > 1
        self._syncs += 1
        if not due:
            return {}
        trainer, gap, bound = self._everywhere(self._trainer()), 0.0, 0.0
        if self.rollout is not None:
            rollout = torch.tensor(sum(self.rollout.score(self.rows), []))
            gap, bound = float((trainer - rollout).abs().mean()), probe_bound(self.dtype, trainer)
        (failed,) = self.resharder.agreement.maximum(not gap <= bound)  # NaN fails as well
        if failed:
            raise WeightsDifferError(self._explain(version, gap, bound))
        return {"probe_gap": gap} if self.rollout is not None else {}

    def _everywhere(self, log_probs: torch.Tensor) -> torch.Tensor:
        """The trainer's log-probs on every rank that generates: where the two are apart, rank 0 of the group sends them."""
        resharder, count = self.resharder, sum(len(row) - 1 for row in self.rows)
        takers = [place >= 0 for place in resharder.plan.targets.of_rank]
        if takers[0]:
            return log_probs
        own = resharder.own.rank
        sends = [count * (own == 0 and taker) for taker in takers]
        receives = [count * (takers[own] and rank == 0) for rank in range(len(takers))]
        send = log_probs.to(resharder.device).repeat(sum(takers) if own == 0 else 0)
        return resharder.agreement.exchange_many(send, sends, receives).cpu()

    def _trainer(self) -> torch.Tensor:
        """Log-probs of every token but the first of each row, float32; empty on ranks that only generate."""
        if self.engine is None:
            return torch.empty(0)
        first, rest = [row[:1] for row in self.rows], [row[1:] for row in self.rows]
        batch = Batch({"prompt_ids": Ragged.from_rows(first, dtype=torch.int64), "response_ids": Ragged.from_rows(rest, dtype=torch.int64)})
        budget = sum(map(len, self.rows))
        return self.engine.log_probs(batch, temperature=1.0, token_budget=budget, entropy=False)["log_prob"].values

    def _explain(self, version: int, gap: float, bound: float) -> str:
        wrong = differing(self.resharder)
        what = (f"sync to version {version}: rollout and trainer log-probs of the probe differ by {gap:.3g} on average (this rank), "
                f"bound {bound:.3g}")
        if wrong:
            return what + "; generation weights that are not the trainer's:\n" + "\n".join(wrong)
        return (what + "; yet every generation weight equals the trainer's bit for bit: the two engines compute this model differently. "
                "Compare what config.json says (rope, norm epsilon, biases) with what each supports")
