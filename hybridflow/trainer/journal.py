"""What a run writes down and shows: metrics, sampled rollouts, status, console and curves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridflow.algorithms.base import Prompts
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.errors import OutputError
from hybridflow.observe.console import PlainConsole, make_console
from hybridflow.observe.metrics import MetricsWriter
from hybridflow.observe.rollouts import Rollout, from_batch, pick, write_rollouts
from hybridflow.observe.run_folder import RunFolder
from hybridflow.trainer.prepare import Prepared
from hybridflow.trainer.validation import Validation

SCORES = ("reward/", "reward_model/", "cost/", "cost_model/")  # columns in which sources say what they think of a response
logger = logging.getLogger(__name__)
ANSWER_TYPES = (str, int, float, bool)  # columns of a data row that are written beside a rollout


class Journal:
    """Writes into a run folder and onto the console; `close` leaves the status and the curves."""

    def __init__(self, folder: RunFolder, prepared: Prepared) -> None:
        self.folder = folder
        self.tokenizer: PreTrainedTokenizerBase = prepared.tokenizer
        self.rollouts_per_step = prepared.config.trainer.rollouts_per_step
        kind = ALGORITHMS[prepared.config.algorithm.name].data
        self.console: PlainConsole = make_console(kind, prepared.steps)
        with _written(folder.metrics):
            self.metrics = MetricsWriter(folder.metrics)
        self.ended = False
        self.first: list[Rollout] = []
        self.last: list[Rollout] = []

    def start(self, title: str, summary: dict[str, object]) -> None:
        self.console.start(title, summary)

    def phase(self, name: str) -> None:
        self.console.phase(name)

    def warn(self, message: str, key: str | None = None) -> None:
        self.console.warn(message, key)

    def validation(self, step: int, validation: Validation) -> None:
        """Validation of the weights after `step` steps; its first and last rollouts are kept for the end."""
        with _written(self.folder.metrics):
            self.metrics.write(step, validation.metrics)
        self.console.step(step, validation.metrics)
        if validation.samples is not None:
            self.last = from_batch(validation.samples, self._decode, step)
            self.first = self.first or self.last
            with _written(self.folder.rollouts):
                write_rollouts(self.folder.rollouts / "validation", step, self.last)

    def step(self, step: int, metrics: dict[str, float], samples: list[Rollout]) -> None:
        """One completed step. Raises OutputError when it cannot be written down."""
        with _written(self.folder.metrics):
            self.metrics.write(step, metrics)
        self.console.step(step, metrics)
        if samples:
            with _written(self.folder.rollouts):
                write_rollouts(self.folder.rollouts, step, samples)
        with _written(self.folder.status_file):
            self.folder.progress(step)

    def sample_rollouts(self, step: int, batch: ShardedBatch, prompts: Prompts) -> list[Rollout]:
        """A few responses of the step as text, with the scalar columns of their data rows."""
        if self.rollouts_per_step == 0:
            return []
        rows = batch.select(pick(batch["prompt_id"], self.rollouts_per_step, step))
        shown = rows.fetch()
        columns = [prompts.columns[prompt_id] for prompt_id in shown["prompt_id"].tolist()]
        names = [name for name, value in columns[0].items() if isinstance(value, ANSWER_TYPES)]
        shown = shown.with_columns(**{name: [row.get(name) for row in columns] for name in names if name not in shown})
        scored = [name for name in shown if name == "cost" or name.startswith(SCORES)]
        return from_batch(shown, self._decode, step, [name for name in names if name in shown] + scored)

    def finish(self, steps: int) -> None:
        """Curves, the final table, the rollouts before and after, and where everything is."""
        from hybridflow.observe.plots import write_curves  # matplotlib: a second that no start has to wait for

        with _written(self.folder.root):
            self.metrics.close()
            curves = write_curves(self.folder)
        if self.first:
            self.console.samples("before training:", self.first)
            self.console.samples(f"after {steps} steps:", self.last)
        with _written(self.folder.status_file):
            self.folder.finish(steps)
        model = self.folder.checkpoint if self.folder.checkpoint.exists() else "not saved (trainer.save_final=false)"
        self.console.finish(f"finished: {steps} steps", {"run folder": self.folder.root, "curves": curves[0], "model": model})

    def fail(self, reason: str) -> None:
        """A bad end. Only the first cause is noted: what fails while the run is taken down follows from it."""
        if self.ended:
            return
        self.ended = True
        for action in (self.metrics.close, self.console.close, lambda: self.folder.fail(reason)):
            try:
                action()
            except OSError as error:  # a full disk, say: it must hide neither the cause nor what can still be done
                logger.error("the end of the run could not be noted in %s: %s", self.folder.root, error)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """What the system says of `path`, as the error that ends the run."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error}; make room or give another trainer.output_dir") from error
