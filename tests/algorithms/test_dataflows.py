"""The step of every algorithm that generates, on roles that answer from a script: what changes a score, or leaves a response out,
reaches the advantages, weights and metrics of all of them alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from hybridflow.algorithms.base import Flow, Prompts, StepOutput
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.algorithms.token_advantages import TokenAdvantages
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.config.algorithms import GENERATING
from hybridflow.config.schema import Config
from hybridflow.data.batch import FINISH_LENGTH, FINISH_STOP, Batch, Ragged
from hybridflow.observe.timer import PhaseTimer
from hybridflow.rewards.sources import PendingReward

SHIPPED = Path(__file__).parents[2] / "configs/algorithm"
PROMPTS, N, MAX_LENGTH = 2, 4, 16
NAN = math.nan


@dataclass
class Script:
    """What the roles answer, by response (prompt-major; greedy: by prompt), and what the actor and the critics were sent."""

    length: list[int] = field(default_factory=lambda: [5, 15, 5, 9, 7, 7, 8, 6])
    cut: set[int] = field(default_factory=set)
    reward: list[float] = field(default_factory=lambda: [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    greedy: list[float] = field(default_factory=lambda: [0.5, 0.5])
    cost: list[float] = field(default_factory=lambda: [0.0] * PROMPTS * N)
    kl: list[float] = field(default_factory=lambda: [0.0] * PROMPTS * N)  # of each token
    advantage: list[float] = field(default_factory=list)  # mean over the tokens of each response
    minis: list[ShardedBatch] = field(default_factory=list)

    def generate_sequences(self, prompts: ShardedBatch, *, n: int, **_: Any) -> SimpleNamespace:
        rows = prompts.select(torch.arange(len(prompts)).repeat_interleave(n))
        length = torch.tensor(self.length if n == N else [4] * len(rows))
        finish = torch.tensor([FINISH_LENGTH if row in self.cut else FINISH_STOP for row in range(len(rows))])
        return done(rows.with_columns(response_length=length, finish_reason=finish))

    def compute_reward(self, batch: ShardedBatch, prompts: Prompts) -> PendingReward:
        return self._pending("reward", self.reward if len(batch) == PROMPTS * N else self.greedy)

    def compute_cost(self, batch: ShardedBatch, prompts: Prompts) -> PendingReward:
        return self._pending("cost", self.cost)

    def _pending(self, what: str, scores: list[float]) -> PendingReward:
        column = ShardedBatch(len(scores), Batch({what: torch.tensor(scores)}))
        return PendingReward(what, done((column, [{}])), [], len(scores), True)

    def compute_log_prob(self, batch: ShardedBatch) -> SimpleNamespace:
        zeros, length = torch.zeros(len(batch)), batch["response_length"].float()
        return done(columns(log_prob_sum=-length, entropy_sum=length, gap_sum=zeros, gap_max=zeros, log_ratio_sum=zeros, ratio_sum=length))

    def compute_ref_log_prob(self, batch: ShardedBatch) -> SimpleNamespace:
        return done(columns(kl_sum=torch.tensor(self.kl) * batch["response_length"]))

    def compute_values(self, batch: ShardedBatch) -> SimpleNamespace:
        return done(ShardedBatch(len(batch)))

    def compute_advantage(self, batch: ShardedBatch, *, estimator: TokenAdvantages) -> SimpleNamespace:
        """The estimator on the tokens that a rank would have: k1 between them is `kl`."""
        lengths = batch["response_length"]
        tokens = torch.zeros(int(lengths.sum()))
        kl_T = torch.tensor(self.kl).repeat_interleave(lengths)
        held = {"old_log_prob": tokens, "ref_log_prob": -kl_T, "values": tokens, "cost_values": tokens}
        if not self.critics:
            del held["values"]
        made = estimator(Batch({**batch.small.columns, **{name: Ragged(v, lengths) for name, v in held.items()}}), lambda values: values)
        self.advantage = (made["advantage"].sums() / lengths).tolist()
        return done(ShardedBatch(len(batch)))

    def update_actor(self, mini: ShardedBatch) -> SimpleNamespace:
        self.minis.append(mini)
        if "advantage" in mini:
            self.advantage = mini["advantage"].tolist()
        return done([{"loss": 0.0, "lr": 0.0}])

    def update_critic(self, mini: ShardedBatch) -> SimpleNamespace:
        self.minis.append(mini)
        names = ("loss", "grad_norm", "lr", "clip_fraction", "value", "return", "return_square", "error", "error_square")
        return done([dict.fromkeys(names, 0.0)])

    def leave_generation(self) -> SimpleNamespace:
        return done(None)

    def run(self, name: str, **changes: object) -> StepOutput:
        """One step with the shipped settings of the algorithm and these changes."""
        config, shipped = Config(), yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
        config.rollout.n, config.rollout.max_response_length = N, MAX_LENGTH
        for key, value in {**shipped, "lam": 1.0, **changes}.items():
            getattr(config.algorithm, key)
            setattr(config.algorithm, key, value)
        return ALGORITHMS[name].step(self._flow(config), Prompts(columns(prompt_id=torch.tensor([10, 11])), {}, {}))

    def _flow(self, config: Config) -> Flow:
        algorithm = ALGORITHMS[config.algorithm.name]
        self.critics = "critic" in algorithm.roles
        return Flow(config, PhaseTimer(), actor=self, reference=self, reward=self, critic=self, cost_critic=self, step=1,
                    cost=SimpleNamespace(compute_reward=self.compute_cost), controllers=algorithm.controllers(config))


def done(value: Any) -> SimpleNamespace:
    """A verb's result, as a Future gives it."""
    return SimpleNamespace(get=lambda: value, first=lambda: value[0])


def columns(**made: torch.Tensor) -> ShardedBatch:
    return ShardedBatch(len(next(iter(made.values()))), Batch(made))


every_algorithm = pytest.mark.parametrize("name", GENERATING)


@every_algorithm
def test_the_penalty_of_a_long_response_reaches_its_advantage(name: str) -> None:
    """Responses 0 and 1 have one prompt and one reward; 1 is three tokens into a buffer of four."""
    plain, shaped = Script(), Script()
    plain.run(name)
    output = shaped.run(name, overlong_buffer=4, overlong_penalty=1.0)
    assert plain.advantage[0] == pytest.approx(plain.advantage[1]) and plain.advantage[0] > plain.advantage[2]
    assert shaped.advantage[0] > shaped.advantage[1] + 0.1
    assert output.metrics["reward/mean"] == 0.5, "what is reported is what was scored"


@every_algorithm
def test_the_penalty_of_divergence_in_the_reward_reaches_its_advantage(name: str) -> None:
    script = Script(length=[8] * 8, kl=[0.0, 0.5] + [0.0] * 6)
    script.run(name, kl_in="reward", kl_coef=0.1, kl_estimator="k1")
    assert script.advantage[0] > script.advantage[1] + 0.05


@every_algorithm
@pytest.mark.parametrize("left_out", ["no reward", "cut off"])
def test_a_response_that_is_left_out_has_no_weight_and_spoils_no_number(name: str, left_out: str) -> None:
    """Also where it is the baseline: ReMax's greedy response to the first prompt has no reward either."""
    script = Script(cut={3}) if left_out == "cut off" else Script(greedy=[NAN, 0.5])
    if left_out == "no reward":
        script.reward[3] = NAN
    output = script.run(name, mask_truncated=True)
    for mini in script.minis:
        weight = mini["loss_weight"]
        assert weight[3] == 0 and (weight[torch.arange(8) != 3] > 0).all()
    assert script.minis and all(map(math.isfinite, output.metrics.values())), output.metrics
    assert all(map(math.isfinite, script.advantage)) and any(script.advantage)


def test_a_response_without_a_cost_is_left_out() -> None:
    script = Script(cost=[0.5, NAN, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    output = script.run("safe_rlhf")
    assert len(script.minis) == 3 and all((mini["loss_weight"] == 0).tolist() == [row == 1 for row in range(8)] for mini in script.minis)
    assert output.metrics["cost/mean"] == pytest.approx(1.5 / 7) and all(map(math.isfinite, output.metrics.values()))
