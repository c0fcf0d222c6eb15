"""Time of a GRPO step outside generation, forward, backward and optimizer: controller, rewards, advantages, data movement.

    python scripts/bench/controller.py [--algorithm grpo] [--prompts 1024] [--n 8] [--tokens 2048] [--ranks 2] [--steps 3]

The real dataflow (with a reference) over real worker groups, batches and reward processes. Only the models
are absent: a rank makes its tokens and log-probs before the clock runs and hands out copies, so every second that is left
is ours. Prints milliseconds and bytes through the driver by phase, and fails where tokens pass through the driver.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.algorithms.base import Flow, Prompts
from hybridflow.algorithms.registry import get_algorithm
from hybridflow.cluster.bootstrap import Cluster, cluster_session
from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.cluster.sharded import DRIVER_BYTES, ShardedBatch
from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.config.load import load_config
from hybridflow.config.schema import ClusterConfig, Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.data.char_tokenizer import char_tokenizer
from hybridflow.observe.timer import PhaseTimer
from hybridflow.rewards.sources import RewardSources
from hybridflow.workers.actor import mismatch_columns
from hybridflow.workers.reward import RewardWorker

CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz"
PROMPT_TOKENS = 64


class Ready:
    """The actor and reference roles without their models: tokens and log-probs are there before they are asked for."""

    def __init__(self, context: WorkerContext, tokens: int, vocab: int) -> None:
        self.tokens, self.vocab = tokens, vocab
        self.made: Batch | None = None
        self.scores: dict[int, Ragged] = {}

    @register(Protocol.MICRO_DP)
    def prepare(self, prompts: Batch, *, n: int) -> None:
        """Make the responses of this replica: `tokens` tokens on average, between half and one and a half times as many."""
        draw = torch.Generator().manual_seed(int(prompts["prompt_id"][0]))
        rows = torch.arange(len(prompts)).repeat_interleave(n)
        lengths = torch.randint(self.tokens // 2, self.tokens * 3 // 2 + 1, (len(rows),), generator=draw)
        total = int(lengths.sum())
        repeated = prompts.select(rows)
        self.made = repeated.with_columns(
            sample_index=torch.arange(n).repeat(len(prompts)), response_length=lengths,
            response_ids=Ragged(torch.randint(4, self.vocab, (total,), generator=draw), lengths),
            rollout_log_prob=Ragged(-torch.rand(total, generator=draw), lengths),
            finish_reason=torch.zeros(len(rows), dtype=torch.int64), weight_version=torch.zeros(len(rows), dtype=torch.int64))

    @register(Protocol.MICRO_DP)
    def generate_sequences(self, prompts: Batch, *, step: int, version: int, n: int, temperature: float) -> Batch:
        return self.made

    @register(Protocol.ONE_TO_ALL)
    def leave_generation(self) -> None:
        """No engine to put to sleep."""

    @register(Protocol.DP)
    def compute_log_prob(self, batch: Batch) -> Batch:
        log_prob = batch["rollout_log_prob"]
        return Batch({"old_log_prob": log_prob, "log_prob_sum": log_prob.sums(), "entropy_sum": torch.zeros(len(batch)),
                      **mismatch_columns(log_prob, log_prob)})

    @register(Protocol.DP)
    def compute_ref_log_prob(self, batch: Batch) -> Batch:
        log_prob = batch["old_log_prob"]
        return Batch({"ref_log_prob": log_prob, "ref_log_prob_sum": log_prob.sums(), "kl_sum": torch.zeros(len(batch))})

    @register(Protocol.DP)
    def compute_advantage(self, batch: Batch, *, estimator: Callable) -> Batch:
        return estimator(batch, self._sum_over_ranks)

    def _sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    @register(Protocol.DP)
    def update_actor(self, batch: Batch) -> dict[str, float]:
        return {"loss": 0.0, "lr": 0.0}


class MeasuredTimer(PhaseTimer):
    """PhaseTimer that also notes the bytes which passed through the driver in each phase."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self._open, self._before = "other", 0
        super().__init__(on_phase=self._note)

    def _note(self, name: str) -> None:
        now = DRIVER_BYTES.sent + DRIVER_BYTES.received
        self.bytes[self._open] = self.bytes.get(self._open, 0) + now - self._before
        self._open, self._before = name or "other", now


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", default="grpo", help="grpo, or reinforce_pp for token-level advantages")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--n", type=int, default=8, help="responses per prompt")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per response, on average")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mini-batches", type=int, default=4, help="optimizer steps per rollout")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one that is not")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(arguments, folder)
        store = 40e-9 * arguments.prompts * arguments.n * arguments.tokens + 0.3
        settings = ClusterConfig(device="cpu", ranks_per_node=arguments.ranks, object_store_gib=store)
        with cluster_session(settings) as cluster:
            phases = measure(config, cluster, arguments)
    return report(phases, arguments)


def configuration(arguments: argparse.Namespace, folder: str) -> Config:
    char_tokenizer(CHARACTERS).save_pretrained(folder)
    config = load_config([f"algorithm={arguments.algorithm}"]).config
    config.actor.model.path = folder
    config.reward.function = "hybridflow.rewards.tasks.addition:score"  # costs nothing: what is left is the way to it and back
    config.rollout.n, config.rollout.max_response_length = arguments.n, arguments.tokens * 3 // 2
    config.algorithm.kl_coef = 0.01
    config.algorithm.mini_batch_size = arguments.prompts * arguments.n // arguments.mini_batches
    return config


def measure(config: Config, cluster: Cluster, arguments: argparse.Namespace) -> dict[str, tuple[float, int]]:
    """Median milliseconds and bytes through the driver of each phase."""
    generation = GenerationLayout(arguments.ranks, 1, tuple((rank,) for rank in range(arguments.ranks)))
    ready = (Ready, {"tokens": arguments.tokens, "vocab": len(CHARACTERS)})
    group = cluster.worker_group({"actor": ready, "reference": ready}, layout=Layout(arguments.ranks), generation=generation)
    scorer = (RewardWorker, {"config": config, "settings": config.reward})
    rewards = cluster.worker_group({"reward": scorer}, layout=Layout(1), pool=ResourcePool([1], "cpu"))
    timer = MeasuredTimer()
    algorithm = get_algorithm(arguments.algorithm)
    flow = Flow(config, timer, group.role("actor"), group.role("reference"), RewardSources(rewards.role("reward")),
                controllers=algorithm.controllers(config))
    group.role("actor").prepare(draw(arguments, 0).batch, n=arguments.n).get()
    steps = []
    for step in range(arguments.steps + 1):
        timer.bytes.clear()
        DRIVER_BYTES.reset()
        timer._before = 0
        timer.finish_step()
        flow.step = step + 1
        with timer.phase("draw"):
            prompts = draw(arguments, 0)
        algorithm.step(flow, prompts)
        timer._note("")
        seconds = timer.finish_step()
        steps.append({name: (1000 * seconds[f"seconds/{name}"], timer.bytes.get(name, 0)) for name in timer.bytes})
    group.close()
    rewards.close()
    return {name: (statistics.median(s[name][0] for s in steps[1:]), steps[-1][name][1]) for name in steps[-1]}


def draw(arguments: argparse.Namespace, first: int) -> Prompts:
    ids = range(first, first + arguments.prompts)
    tokens = Ragged(torch.full((PROMPT_TOKENS * len(ids),), 5), torch.full((len(ids),), PROMPT_TOKENS))
    batch = Batch({"prompt_id": torch.tensor(ids), "prompt_ids": tokens, "prompt_length": tokens.lengths})
    return Prompts(ShardedBatch.from_batch(batch), dict.fromkeys(ids, "1" * PROMPT_TOKENS), {i: {"answer": i} for i in ids})


def report(phases: dict[str, tuple[float, int]], arguments: argparse.Namespace) -> int:
    rows = arguments.prompts * arguments.n
    tokens = rows * arguments.tokens
    print(f"{arguments.algorithm}, {rows} responses x {arguments.tokens} tokens, {arguments.ranks} ranks, {os.cpu_count()} cores, "
          f"{time.strftime('%Y-%m-%d')}, {Path(__file__).name}")
    print(f"{'phase':<14}{'ms':>10}{'KiB through the driver':>26}")
    for name, (milliseconds, size) in phases.items():
        print(f"{name:<14}{milliseconds:>10.0f}{size / 1024:>26.0f}")
    total = sum(size for _, size in phases.values())
    print(f"{'all':<14}{sum(ms for ms, _ in phases.values()):>10.0f}{total / 1024:>26.0f}   ({total / rows:.0f} bytes per response; "
          f"its response tokens are {8 * arguments.tokens})")
    if total > 8 * tokens / 2:  # one token column through the driver would be all of it
        print("FAILED: tokens pass through the driver")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
