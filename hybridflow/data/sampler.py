"""Which prompts a step takes: deterministic, resumable, and without a dropped prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridflow.errors import DataError


@dataclass(frozen=True)
class Draw:
    """indices: rows of the dataset. instance_ids: running numbers of the draws, unique over the whole run."""

    indices: list[int]
    instance_ids: list[int]


class PromptSampler:
    """Walks through the data epoch by epoch in batches of `batch_size`.

    The draw at position p of the run is row `order(p // size)[p % size]`, and an epoch's order depends on (seed, epoch)
    only: not on the batch size, the ranks, or whether the run was resumed. A batch may cross the end of an epoch, so every
    prompt is drawn exactly once per epoch. The instance id of a draw is p: two draws of one prompt are two groups.
    """

    def __init__(self, size: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if batch_size < 1:
            raise DataError(f"data.train_batch_size={batch_size} must be at least 1")
        if size < batch_size:
            raise DataError(
                f"the data holds {size} prompts, fewer than data.train_batch_size={batch_size}: "
                f"a step would repeat prompts; set data.train_batch_size to at most {size}, or give more data"
            )
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.consumed = 0  # draws so far
        self._epoch, self._order = -1, np.empty(0, np.int64)

    @property
    def epoch(self) -> float:
        """Passes over the data so far, e.g. 1.25."""
        return self.consumed / self.size

    def steps(self, epochs: int) -> int:
        """Batches until every prompt was drawn `epochs` times; the last one may reach into the next epoch."""
        return -(-self.size * epochs // self.batch_size)

    def next(self, count: int | None = None) -> Draw:
        """The next batch, or the next `count` prompts."""
        positions = range(self.consumed, self.consumed + (count or self.batch_size))
        self.consumed = positions.stop
        return Draw([self._row(position) for position in positions], list(positions))

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, self.size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._epoch_order(epoch)
        return int(self._order[offset])

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.size)
        # Raw words of a bit generator are the one random stream that numpy promises never to change.
        words = np.random.PCG64(np.random.SeedSequence([self.seed % 2**64, epoch])).random_raw(self.size)
        return np.argsort(words, kind="stable")

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed, "size": self.size, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last batch of the saved run; the batch size may be another one.

        Raises DataError when data, seed or shuffling differ: the order could not continue.
        """
        for name in ("size", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise DataError(
                    f"cannot resume the data order: the checkpoint was written with {name}={state[name]}, "
                    f"this run has {name}={getattr(self, name)}; use the same data files, trainer.seed and data.shuffle"
                )
        self.consumed = state["consumed"]
