"""RewardRunner: a reward function in killable processes, with wall-clock limits and counted failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.function import Item, Signature
from hybridflow.rewards.job import Job
from hybridflow.rewards.outcome import RewardResult, to_result
from hybridflow.rewards.process import RewardProcess


class RewardRunner:
    """Runs `config.function` in `config.workers` processes; usable as a context manager.

    - A call that takes longer than `timeout_seconds` is killed with its process, which is replaced; its response gets
      `timeout_reward` and counts in reward/timeouts. A batched function has that time for its whole batch.
    - An asynchronous function has up to `concurrency` calls in flight in each process; one that is late is cancelled.
    - A function that returns None abstains: the score is NaN, counted in reward/abstained.
    - A function that raises, returns NaN, infinity or no number, or ends its process: with on_error=raise
      RewardError with the response and the traceback; with on_error=score the response gets `error_reward` and counts in
      reward/errors.
    - A value of a wrong shape ([B, 1], another length) is always RewardError: its rows cannot be told apart.
    """

    def __init__(self, config: RewardConfig) -> None:
        if config.on_error not in ("raise", "score"):
            raise ConfigError(f"{config.section}.on_error={config.on_error!r} is none of raise, score")
        if config.workers < 1 or not config.timeout_seconds > 0:
            raise ConfigError(f"{config.section}.workers={config.workers} and {config.section}.timeout_seconds={config.timeout_seconds} "
                              "must be above 0")
        self.config = config
        self.processes = [RewardProcess(config) for _ in range(config.workers)]

    def signature(self) -> Signature:
        """What the function accepts. Raises ConfigError when it cannot be loaded or fits no contract."""
        return self.processes[0].wait_ready()

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[dict[str, Any]],
        finish_reasons: Sequence[str] | None = None, response_lengths: Sequence[int] | None = None,
    ) -> RewardResult:
        """Score B responses. columns: the data columns of each row. finish_reasons: "stop" or "length".
        response_lengths: tokens of each response, needed for token-level rewards."""
        finish_reasons = finish_reasons if finish_reasons is not None else ["stop"] * len(responses)
        lengths = response_lengths if response_lengths is not None else [None] * len(responses)
        items = [Item(*row) for row in zip(prompts, responses, columns, finish_reasons, lengths, strict=True)]
        if not items:
            return to_result([], [], self.config)
        if not self.processes:
            raise RewardError("the reward runner is closed")
        job = Job(self.config, self.processes, items)
        try:
            return to_result(job.run(), items, self.config)
        finally:
            self.processes = job.leave()

    def close(self) -> None:
        """End every process. Calling it again does nothing."""
        for process in self.processes:
            process.kill()
        self.processes = []

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
