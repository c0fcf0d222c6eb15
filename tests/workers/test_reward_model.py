"""Reward models on real Megatron ranks, with the reward function and a light head beside them, against Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.cluster.worker_group import WorkerGroup
from hybridflow.config.layout import Layout
from hybridflow.config.reward_models import COST, REWARD, scorers
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import ModelError
from hybridflow.rewards.sources import RewardSources
from hybridflow.workers.reward import RewardWorker
from hybridflow.workers.reward_head import RewardHeadWorker
from hybridflow.workers.reward_model import RewardModelWorker
from tests.engine.tiny import make_checkpoint
from tests.rewards.test_scored_text import TEMPLATE
from tests.tiny import tiny_tokenizer

ROWS = 48
ACTOR, OTHER = tiny_tokenizer(), tiny_tokenizer(vocab=80, chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """`same` reads the actor's tokens; `other` has a tokenizer and a chat template of its own, and a light head."""
    root = tmp_path_factory.mktemp("reward_model")
    config = Config()
    config.actor.model.path, config.actor.model.dtype = str(root / "actor"), "float32"
    ACTOR.save_pretrained(root / "actor")
    for name, tokenizer, changes in (("same", ACTOR, {}), ("other", OTHER, {"vocab_size": 80, "hidden_size": 32})):
        path = Path(make_checkpoint(root / name, "llama", layers=2, scalar=True, **changes))
        tokenizer.save_pretrained(path)
        config.reward_models[name] = {"model": {"path": str(path)}, "weight": 0.5, "score_max_tokens_per_micro_batch": 64}
    config.reward_models["same"]["normalize"] = "running"
    config.reward_models["other"] |= {"distill_ratio": 0.4, "weight": 2.0}
    config.cost.models["harm"] = {"model": {"path": config.reward_models["same"]["model"]["path"]}, "weight": -2.0}
    config.reward.function, config.reward.workers = "tests.rewards.functions:abstains", 1
    return config


@pytest.fixture(scope="module")
def groups(ray_cluster: Cluster, config: Config) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    """All models on two ranks, tensor parallel 2; the function and the head in a CPU process."""
    costs = {scorer.role: (RewardModelWorker, {"config": config, "scorer": scorer}) for scorer in scorers(config, COST).values()}
    models = {name: (RewardModelWorker, {"config": config, "scorer": scorer}) for name, scorer in scorers(config, REWARD).items()}
    beside = {"reward": (RewardWorker, {"config": config, "settings": config.reward}),
              "reward_head": (RewardHeadWorker, {"config": config})}
    pools = ResourcePool([2], "cpu"), ResourcePool([1], "cpu")
    made = (ray_cluster.worker_group(models | costs, layout=Layout(2, tp=2), pool=pools[0]),
            ray_cluster.worker_group(beside, layout=Layout(1), pool=pools[1]))
    yield made
    for group, pool in zip(made, pools):
        group.close()
        pool.close()


@pytest.fixture
def sources(groups: tuple[WorkerGroup, WorkerGroup], config: Config) -> RewardSources:
    models = [(scorer, groups[0].role(name)) for name, scorer in scorers(config, REWARD).items()]
    return RewardSources(groups[1].role("reward"), models, groups[1].role("reward_head"), seed=1)


def rollout(version: int) -> tuple[Batch, SimpleNamespace]:
    """Four responses to each prompt; the function abstains from the third prompt's; every other prompt is a chat."""
    draw = torch.Generator().manual_seed(version)
    prompts = ROWS // 4
    texts = {i: f"{i}+{i}=" for i in range(prompts)}
    lengths = torch.randint(1, 12, (ROWS,), generator=draw)
    rows = torch.arange(prompts).repeat_interleave(4)
    responses = Ragged(torch.randint(4, 60, (int(lengths.sum()),), generator=draw), lengths)
    prompt_ids = Ragged.from_rows([ACTOR(texts[i])["input_ids"] for i in rows.tolist()], torch.int64)
    batch = Batch({"prompt_id": rows, "sample_index": torch.arange(4).repeat(prompts), "prompt_ids": prompt_ids, "response_ids": responses,
                   "prompt_length": prompt_ids.lengths, "response_length": lengths, "finish_reason": torch.ones(ROWS, dtype=torch.int64),
                   "weight_version": torch.full((ROWS,), version)})
    chats = {i: [{"role": "system", "content": "add"}, {"role": "user", "content": texts[i]}] for i in range(0, prompts, 2)}
    return batch, SimpleNamespace(texts=texts, chats=chats, columns={i: {"answer": None if i == 2 else i} for i in range(prompts)})


@torch.no_grad()
def reference(path: str, rows: list[list[int]]) -> torch.Tensor:
    """Hugging Face's sequence classification in float64, row by row."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64).eval()
    return torch.cat([model(torch.tensor([row])).logits[:, 0] for row in rows])


def expected(config: Config, batch: Batch, prompts: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw scores of `same` and `other` [B]."""
    joined = [torch.cat(pair).tolist() for pair in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows())]
    talks = [[*prompts.chats.get(i, [{"role": "user", "content": prompts.texts[i]}]), {"role": "assistant", "content": ACTOR.decode(row)}]
             for i, row in zip(batch["prompt_id"].tolist(), batch["response_ids"].rows())]
    own = [OTHER.apply_chat_template(talk, tokenize=True, return_dict=False) for talk in talks]
    path = {name: entry["model"]["path"] for name, entry in config.reward_models.items()}
    return reference(path["same"], joined), reference(path["other"], own)


def test_scores_of_every_source_and_the_reward_they_make(sources: RewardSources, config: Config) -> None:
    """Column and metric of each raw score; the reward is the weighted sum of the normalised ones and the function's."""
    seen = []
    for version in (1, 2):
        batch, prompts = rollout(version)
        columns, (metrics,) = sources.compute_reward(ShardedBatch.from_batch(batch), prompts).get()
        same, other = expected(config, batch, prompts)
        seen.append(same)
        torch.testing.assert_close(columns["reward_model/same"].double(), same, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(columns["reward_model/other"].double(), other, atol=1e-4, rtol=1e-4)  # the head knows nothing yet
        assert metrics["reward_model/same"] == pytest.approx(same.mean().item(), abs=1e-4)
        assert metrics["reward_model/other/calls_saved"] == 0.0 and metrics["reward_model/other/fallback"] == 1.0
        assert metrics["reward/abstained"] == 4.0 and metrics["reward_model/same/cut"] == 0.0
        function = columns["reward/function"].double()
        assert function.isnan().nonzero().flatten().tolist() == [8, 9, 10, 11]
        every = torch.cat(seen)
        reward = function.nan_to_num(0.0) + 0.5 * (same - every.mean()) / every.std() + 2.0 * other
        torch.testing.assert_close(columns["reward"].double(), reward, atol=1e-3, rtol=1e-3)


def test_a_cost_model_scores_as_a_reward_model_does(groups: tuple[WorkerGroup, WorkerGroup], config: Config) -> None:
    """Its raw score is a column, weighted it is the cost; nothing is called a reward."""
    batch, prompts = rollout(5)
    costs = RewardSources(None, [(scorer, groups[0].role(scorer.role)) for scorer in scorers(config, COST).values()], what="cost")
    columns, (metrics,) = costs.compute_reward(ShardedBatch.from_batch(batch), prompts).get()
    same, _ = expected(config, batch, prompts)
    torch.testing.assert_close(columns["cost_model/harm"].double(), same, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(columns["cost"].double(), -2.0 * same, atol=1e-3, rtol=1e-3)
    assert metrics["cost_model/harm"] == pytest.approx(same.mean().item(), abs=1e-4)
    assert not any(name.startswith("reward") for name in (*columns.small, *metrics))


def test_validation_learns_nothing_and_adds_raw_scores(sources: RewardSources, config: Config) -> None:
    batch, prompts = rollout(3)
    before = sources.state_dict()
    columns, (metrics,) = sources.compute_reward(ShardedBatch.from_batch(batch), prompts, training=False).get()
    same, other = expected(config, batch, prompts)
    reward = columns["reward/function"].double().nan_to_num(0.0) + 0.5 * same + 2.0 * other
    torch.testing.assert_close(columns["reward"].double(), reward, atol=1e-3, rtol=1e-3)
    assert sources.state_dict()["normalizers"] == before["normalizers"]
    assert torch.equal(sources.state_dict()["heads"]["other"]["gram"], before["heads"]["other"]["gram"])
    assert "reward_model/other/calls_saved" not in metrics


def test_a_head_that_predicts_saves_calls(sources: RewardSources, config: Config, groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    """With a head whose known error is small, unaudited responses never reach the model, and the audited ones measure it."""
    batch, prompts = rollout(4)
    head, state = groups[1].role("reward_head"), sources.state_dict()
    for name in ("everywhere", "passing"):
        state["heads"]["other"][name] = {"count": 1000.0, "total": 0.0}
    sources.load_state_dict(state)
    guess = head.predict(ShardedBatch.from_batch(batch)).get()["estimate/other"]
    columns, (metrics,) = sources.compute_reward(ShardedBatch.from_batch(batch), prompts).get()
    _, other = expected(config, batch, prompts)
    by_head = (columns["reward_model/other"].double() - guess).abs() < 1e-5
    assert 0.2 < by_head.double().mean().item() < 0.6 and metrics["reward_model/other/fallback"] == 0.0
    assert metrics["reward_model/other/calls_saved"] == pytest.approx(by_head.double().mean().item())
    torch.testing.assert_close(columns["reward_model/other"].double()[~by_head], other[~by_head], atol=1e-4, rtol=1e-4)
    assert metrics["reward_model/other/distill_error"] > 0  # it claimed to make no error


def test_a_language_model_is_no_reward_model(ray_cluster: Cluster, config: Config, tmp_path: Path) -> None:
    """A random head would score noise; it is refused by name."""
    path = make_checkpoint(tmp_path, "llama", layers=2)
    ACTOR.save_pretrained(path)
    config = replace(config, reward_models={"bare": {"model": {"path": path}}})
    pool = ResourcePool([1], "cpu")
    with pytest.raises(ModelError, match="reward_models.bare.model.path=.* has no score.weight"):
        arguments = {"config": config, "scorer": scorers(config, REWARD)["bare"]}
        ray_cluster.worker_group({"bare": (RewardModelWorker, arguments)}, layout=Layout(1), pool=pool)
    pool.close()
