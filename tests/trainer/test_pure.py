"""Parts of the trainer that need no worker."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridflow.algorithms.base import Prompts
from hybridflow.algorithms.kto import mismatched
from hybridflow.algorithms.minibatch import fill, mini_batches
from hybridflow.algorithms.preferences import weigh_labels, weigh_units
from hybridflow.algorithms.registry import ALGORITHMS, get_algorithm
from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.sharded import DRIVER_BYTES, ShardedBatch
from hybridflow.config.algorithms import GENERATING
from hybridflow.config.batch_rules import updates_per_step
from hybridflow.config.schema import AlgorithmConfig, Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.data.prompts import PromptDataset
from hybridflow.errors import ConfigError, NumericsError
from hybridflow.observe.run_folder import CRITICS
from hybridflow.trainer.draw import draw
from hybridflow.trainer.roles import VALUES
from hybridflow.trainer.run import reason
from hybridflow.trainer.validation import chunks, validate_policy
from tests.tiny import tiny_tokenizer


def responses(count: int, seed: int = 0) -> ShardedBatch:
    """Rows of 0 to 6 tokens, as far as the controller knows them: their tokens would be in Ray."""
    lengths = torch.randint(0, 7, (count,), generator=torch.Generator().manual_seed(seed))
    return ShardedBatch(count, Batch({"prompt_id": torch.arange(count), "response_length": lengths}))


@pytest.mark.parametrize("prompts, n, mini, epochs, expected", [
    (8, 4, None, 1, 1), (8, 4, 32, 1, 1), (8, 4, 16, 1, 2), (8, 4, 12, 1, 3), (8, 4, 16, 3, 6), (5, 3, 4, 2, 8),
])
def test_updates_per_step_counts_what_mini_batches_gives(prompts: int, n: int, mini: int | None, epochs: int, expected: int) -> None:
    config = Config()
    config.data.train_batch_size, config.rollout.n = prompts, n
    config.algorithm.mini_batch_size, config.algorithm.update_epochs = mini, epochs
    assert updates_per_step(config) == expected
    assert len(list(mini_batches(responses(prompts * n), config, step=1))) == expected


def test_a_supervised_step_has_one_row_per_prompt() -> None:
    config = Config()
    config.algorithm.name, config.data.train_batch_size, config.algorithm.mini_batch_size = "sft", 16, 4
    assert updates_per_step(config) == 4
    config.algorithm.name = "dpo"  # two rows each
    assert updates_per_step(config) == 8


def rows_of(config: Config, batch: ShardedBatch, step: int) -> list[list[int]]:
    return [mini["prompt_id"].tolist() for mini in mini_batches(batch, config, step)]


def test_every_pass_covers_the_rows_once_in_an_order_of_its_own() -> None:
    config = Config()
    config.algorithm.mini_batch_size, config.algorithm.update_epochs = 5, 3
    batch = responses(23)
    minis = rows_of(config, batch, step=4)
    passes = [sum(minis[start:start + 5], []) for start in range(0, 15, 5)]
    assert all(sorted(rows) == list(range(23)) for rows in passes)
    assert len({tuple(rows) for rows in passes}) == 3
    assert rows_of(config, batch, step=4) == minis
    assert rows_of(config, batch, step=5) != minis
    config.trainer.seed += 1
    assert rows_of(config, batch, step=4) != minis


@pytest.mark.parametrize("per_unit", [2, 3])
def test_mini_batches_hold_whole_units(per_unit: int) -> None:
    config = Config()
    config.algorithm.mini_batch_size, config.algorithm.update_epochs = 6, 2
    batch = responses(24)
    unit = torch.randperm(24, generator=torch.Generator().manual_seed(1)) // per_unit  # members lie anywhere in the batch
    minis = list(mini_batches(batch.with_columns(unit=unit), config, step=1))
    assert [len(mini) for mini in minis] == [6] * 8
    for mini in minis:
        assert mini["unit"].unique(return_counts=True)[1].tolist() == [per_unit] * (6 // per_unit)
    assert sorted(row for mini in minis[:4] for row in mini["prompt_id"].tolist()) == list(range(24))


def test_mini_batches_without_units_are_those_of_units_of_one_row() -> None:
    config = Config()
    config.algorithm.mini_batch_size, config.algorithm.update_epochs = 5, 2
    batch = responses(23)
    assert rows_of(config, batch.with_columns(unit=torch.arange(23) * 5), step=2) == rows_of(config, batch, step=2)
    order = torch.randperm(23, generator=torch.Generator().manual_seed(hash((config.trainer.seed, 2, 0)) % 2**63))
    assert rows_of(config, batch, step=2)[:5] == [part.tolist() for part in order.split(5)]


def test_a_unit_larger_than_a_mini_batch_is_alone() -> None:
    assert list(fill([[0], [1, 2, 3], [4], [5]], 2)) == [[0], [1, 2, 3], [4, 5]]


def test_mismatched_pairs_give_every_prompt_the_next_response_without_moving_tokens(ray_cluster: Cluster) -> None:
    prompts = Ragged.from_rows([[10 + row] * (row + 1) for row in range(5)], torch.int64)
    answers = Ragged.from_rows([[row] * (7 - row) for row in range(5)], torch.int64)
    batch = ShardedBatch.from_batch(Batch({"prompt_ids": prompts, "prompt_length": prompts.lengths, "response_ids": answers,
                                           "response_length": answers.lengths}))
    DRIVER_BYTES.reset()
    other = mismatched(batch)
    assert (DRIVER_BYTES.sent, DRIVER_BYTES.received) == (0, 0)
    found = other.fetch()
    assert [row.tolist() for row in found["prompt_ids"].rows()] == [row.tolist() for row in prompts.rows()]
    given = answers.rows()
    assert [row.tolist() for row in found["response_ids"].rows()] == [row.tolist() for row in [*given[1:], given[0]]]
    assert found["prompt_length"].tolist() == [1, 2, 3, 4, 5]
    assert found["response_length"].tolist() == [len(row) for row in found["response_ids"].rows()]


@pytest.mark.parametrize("label, expected", [([1, 0, 0, 0], [1, 1 / 3, 1 / 3, 1 / 3]), ([1, 1], [0.5, 0.5])])
def test_rows_are_weighed_within_their_label_and_units_within_the_batch(label: list[int], expected: list[float]) -> None:
    batch = ShardedBatch(len(label), Batch({"label": torch.tensor(label)}))
    assert weigh_labels(batch)["label_weight"].tolist() == pytest.approx(expected)
    assert weigh_units(batch)["unit_weight"].tolist() == [1 / len(label)] * len(label)
    paired = ShardedBatch(4, Batch({"unit": torch.tensor([7, 7, 3, 3])}))
    assert weigh_units(paired)["unit_weight"].tolist() == [0.5] * 4


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean", "constant"])
def test_weights_of_a_mini_batch_are_its_own(aggregation: str) -> None:
    """The weights of token_mean and seq_mean sum to 1 over the tokens of each mini-batch, those of constant to the share used."""
    config = Config()
    config.algorithm.mini_batch_size, config.algorithm.loss_aggregation, config.rollout.max_response_length = 6, aggregation, 6
    for mini in mini_batches(responses(20), config, step=1):
        lengths = mini["response_length"].double()
        total = (mini["loss_weight"] * lengths).sum().item()
        assert total == pytest.approx(lengths.sum().item() / (6 * len(mini)) if aggregation == "constant" else 1.0)
        assert (mini["metric_weight"] * lengths).sum().item() == pytest.approx(1.0)


def test_the_constant_of_given_responses_is_their_own_limit() -> None:
    """SFT has no rollout: its responses are bounded by data.max_response_length."""
    config = Config()
    config.algorithm.name, config.algorithm.loss_aggregation = "sft", "constant"
    config.rollout.max_response_length, config.data.max_response_length = 1024, 8
    (mini,) = mini_batches(responses(4), config, step=1)
    assert set(mini["loss_weight"].tolist()) <= {0.0, 1 / (4 * 8)}


def test_algorithms_are_those_the_settings_know() -> None:
    field = next(field for field in dataclasses.fields(AlgorithmConfig) if field.name == "name")
    assert set(ALGORITHMS) == set(field.metadata["choices"])
    assert set(GENERATING) <= set(ALGORITHMS)
    assert all(ALGORITHMS[name].name == name for name in ALGORITHMS)
    with pytest.raises(ConfigError, match="rlo'.*did you mean 'rloo'.*sft"):
        get_algorithm("rlo")


def test_every_critic_has_its_place_in_the_run_folder() -> None:
    assert set(CRITICS) == set(VALUES)


@pytest.fixture
def dataset(tmp_path: Path) -> PromptDataset:
    rows = [{"prompt": f"{i}+{i}=", "answer": 2 * i, "tags": [i]} for i in range(7)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config()
    return PromptDataset([str(tmp_path / "data.jsonl")], config.data, tiny_tokenizer())


def test_draw_keeps_text_columns_and_tokens_together(dataset: PromptDataset, ray_cluster: Cluster) -> None:
    """Prompts are known by the id of the draw; the same row twice is two prompts."""
    drawn = draw(dataset, [5, 2, 5], [20, 21, 22])
    assert drawn.batch["prompt_id"].tolist() == [20, 21, 22]
    assert drawn.texts == {20: "5+5=", 21: "2+2=", 22: "5+5="}
    assert {name: row["answer"] for name, row in drawn.columns.items()} == {20: 10, 21: 4, 22: 10}
    tokens = drawn.batch.fetch()["prompt_ids"].rows()
    assert [dataset.tokenizer.decode(ids) for ids in tokens] == list(drawn.texts.values())


def test_draw_keeps_the_messages_of_chats(tmp_path: Path, ray_cluster: Cluster) -> None:
    """A reward model with a template of its own renders them again; a plain prompt has none."""
    talk = [{"role": "user", "content": "1+1="}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in (talk, "2+2=")))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}:"
    chats = draw(PromptDataset([str(tmp_path / "data.jsonl")], Config().data, tiny_tokenizer(chat_template=template)), [1, 0], [7, 8])
    assert chats.chats == {8: talk} and chats.texts == {7: "2+2=", 8: "1+1=:"}


@pytest.mark.parametrize("size, most, expected", [(None, None, [7]), (3, None, [3, 3, 1]), (3, 5, [3, 2]), (100, 100, [7])])
def test_validation_chunks_cover_the_rows_once(dataset: PromptDataset, size: int | None, most: int | None, expected: list[int]) -> None:
    config = Config()
    config.data.val_batch_size, config.data.max_val_samples = size, most
    found = list(chunks(SimpleNamespace(config=config, validation=dataset)))
    assert [len(chunk) for chunk in found] == expected
    assert sum(found, []) == list(range(sum(expected)))


@pytest.mark.parametrize("size", [None, 1, 3])
def test_a_validation_is_over_all_responses_that_have_a_score(dataset: PromptDataset, ray_cluster: Cluster, size: int | None) -> None:
    """In parts of any size, also one that nobody scored at all; its rollouts are those of the first rows."""
    config, scores = Config(), torch.tensor([1.0, 0.0, 0.5, math.nan, 1.0, math.nan, 0.25])
    config.data.val_batch_size = size

    def generate(prompts: ShardedBatch, **_: object) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: prompts.with_columns(response_length=prompts["prompt_id"] + 1))

    def score(batch: ShardedBatch, prompts: Prompts, training: bool) -> SimpleNamespace:
        assert not training
        return SimpleNamespace(get=lambda: (ShardedBatch(len(batch), Batch({"reward": scores[batch["prompt_id"]]})), [{}]))

    flow = SimpleNamespace(config=config, generator=SimpleNamespace(generate_sequences=generate), step=1, version=1, cost=None,
                           reward=SimpleNamespace(compute_reward=score))
    found = validate_policy(flow, SimpleNamespace(config=config, validation=dataset))
    assert found.metrics == {"val/reward": pytest.approx(2.75 / 5), "val/response_length": 4.0}
    assert found.samples["prompt_id"].tolist() == list(range(min(3, size or 7)))


def test_the_reason_of_an_end_is_readable() -> None:
    assert reason(NumericsError("loss is nan")) == "NumericsError: loss is nan"
    assert reason(KeyboardInterrupt()) == "interrupted (Ctrl-C)"
    assert reason(SystemExit(3)) == "SystemExit: 3"
