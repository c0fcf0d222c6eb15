"""The training loop: steps, validation, metrics, and the run folder."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

from hybridflow.algorithms.base import Flow, Prompts, StepOutput
from hybridflow.algorithms.summary import prompt_and_response_tokens
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.file_rules import STATE_FILE
from hybridflow.config.placement import ROLLOUT
from hybridflow.config.roles import generates
from hybridflow.errors import NumericsError, RunIncompleteError
from hybridflow.observe.timer import PhaseTimer
from hybridflow.rewards.monitors import reward_warnings
from hybridflow.trainer.draw import draw, given_responses
from hybridflow.trainer.journal import Journal
from hybridflow.trainer.prepare import Prepared
from hybridflow.trainer.roles import Roles
from hybridflow.trainer.state import TrainingState
from hybridflow.trainer.validation import Validation, validate_given, validate_policy

logger = logging.getLogger(__name__)


@dataclass
class RunResult:
    """What a run came to: steps done, and the metrics of every step."""

    steps: int
    history: list[dict[str, float]]


class Trainer:
    """Runs an algorithm's dataflow `steps` times over the sampler's batches."""

    def __init__(self, prepared: Prepared, roles: Roles, journal: Journal) -> None:
        self.prepared, self.config, self.roles, self.journal = prepared, prepared.config, roles, journal
        self.rl = generates(self.config)
        self.timer = PhaseTimer(on_phase=journal.phase)
        self.flow = Flow(self.config, self.timer, roles.actor, roles.get("reference"), roles.rewards, roles.get("critic"), roles.costs,
                         roles.get("cost_critic"), roles.get(ROLLOUT), draw=self._draw, pretrain=self._pretrain if prepared.ptx else None,
                         controllers=prepared.algorithm.controllers(self.config))
        if prepared.report.state is not None:
            prepared.report.state.restore(self.flow)
        self.history: list[dict[str, float]] = []

    def run(self) -> RunResult:
        """All steps, then the last validation and the export. Raises RunIncompleteError when fewer steps were done than asked."""
        steps = self.prepared.steps
        for step in range(1, steps + 1):
            self._step(step)
        if len(self.history) < max(steps, 1):
            raise RunIncompleteError(f"{len(self.history)} of {steps} steps were done; see trainer.steps and trainer.epochs")
        self._finish(steps)
        return RunResult(steps, self.history)

    def _step(self, step: int) -> None:
        prompts = self._draw(self.config.data.train_batch_size)
        self.flow.step = step
        metrics: dict[str, float] = {}
        if self.rl:
            metrics |= self._enter_generation()
        if self._validates_before(step):
            self.journal.validation(step - 1, self._validate())
        output = self.prepared.algorithm.step(self.flow, prompts)
        samples = self.journal.sample_rollouts(step, output.batch, output.prompts or prompts) if self.rl else []
        metrics |= output.metrics | self.timer.finish_step()
        seconds = metrics["seconds/total"] - metrics.get("seconds/validate", 0.0)
        metrics["tokens_per_second"] = prompt_and_response_tokens(output.batch) / seconds
        self._check(step, metrics, output)
        self.history.append(metrics)
        self.journal.step(step, metrics, samples)

    def _draw(self, count: int) -> Prompts:
        """The sampler's next prompts."""
        drawn = self.prepared.sampler.next(count)
        return draw(self.prepared.train, drawn.indices, drawn.instance_ids)

    def _pretrain(self, step: int, number: int) -> ShardedBatch:
        """Rows of data.ptx_files beside mini-batch `number` of the step."""
        return given_responses(self.prepared.ptx, self.config.data.ptx_batch_size, self.config.trainer.seed, step, number)

    def _enter_generation(self) -> dict[str, float]:
        """Give the rollout engine the current weights under a new version."""
        self.flow.version += 1
        with self.timer.phase("sync"):
            for critic in self.roles.critics().values():
                critic.rest().get()
            reports = self.roles.sync_weights(self.flow.version)
        names = dict.fromkeys(name for report in reports for name in report)
        return {f"sync/{name}": max(report[name] for report in reports if name in report) for name in names}

    def _validates_before(self, step: int) -> bool:
        """Validation of the weights before `step`: at the start, and every val_interval steps."""
        trainer = self.config.trainer
        if self.prepared.validation is None:
            return False
        if step == 1:
            return trainer.val_before_train
        return trainer.val_interval > 0 and (step - 1) % trainer.val_interval == 0

    def _validate(self) -> Validation:
        with self.timer.phase("validate"):
            if self.rl:
                return validate_policy(self.flow, self.prepared)
            return validate_given(self.flow, self.prepared)

    def _finish(self, steps: int) -> None:
        """Validate the last weights and write them."""
        if self.prepared.validation is not None:
            if self.rl:
                self._enter_generation()
            self.journal.validation(steps, self._validate())
            if self.rl:
                self.flow.generator.leave_generation().get()
        if self.config.trainer.save_final:
            started = time.perf_counter()
            files = {STATE_FILE: TrainingState.of(self.flow, steps).to_bytes()} if self.rl else {}
            self.roles.actor.export(str(self.journal.folder.checkpoint), files=files).get()
            for name, critic in self.roles.critics().items():
                critic.export(str(self.journal.folder.critics[name])).get()
            logger.info("weights of step %d written to %s in %.1f s", steps, self.journal.folder.checkpoint, time.perf_counter() - started)

    def _check(self, step: int, metrics: dict[str, float], output: StepOutput) -> None:
        """Refuse a step with a value that is not finite; warn about what looks wrong."""
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        if bad:
            raise NumericsError(f"step {step}: not finite: {bad}")
        gap = metrics.get("log_prob_gap/mean", 0.0)
        if gap > self.config.rollout.log_prob_gap_warning:
            self.journal.warn(f"step {step}: rollout and trainer log-probs differ by {gap:.3g} on average "
                              f"(rollout.log_prob_gap_warning={self.config.rollout.log_prob_gap_warning:g})", key="log_prob_gap")
        found = reward_warnings(output.batch["reward"], output.batch["finish_reason"]) if self.rl else {}
        for kind, message in found.items():
            self.journal.warn(f"step {step}: {message}", key=f"reward monitor {kind!r}")
        for name in [name for name in output.batch.small if name.startswith(("reward_model/", "cost_model/"))]:
            for kind, message in reward_warnings(output.batch[name], what=f"{name} score").items():
                self.journal.warn(f"step {step}: {message}", key=f"{name} monitor {kind!r}")
