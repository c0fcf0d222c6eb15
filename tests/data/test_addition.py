"""The demo's assets: a disjoint split, loadable files, a model of the promised shape."""

from __future__ import annotations

import random
import runpy
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoModelForCausalLM

from hybridflow.config.schema import DataConfig, ModelConfig
from hybridflow.data.responses import ResponseDataset
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.rewards.tasks.addition import score

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "prepare_addition.py"))


def test_split_holds_out_a_pair_in_both_orders() -> None:
    train, val = SCRIPT["split"](512, seed=0)
    assert len(val) == 512 and len(train) > 9000 and len(set(train)) == len(train)
    assert not {tuple(sorted(pair)) for pair in train} & {tuple(sorted(pair)) for pair in val}
    assert SCRIPT["split"](512, seed=0) == (train, val) != SCRIPT["split"](512, seed=1)


def test_files_and_model(tmp_path: Path) -> None:
    SCRIPT["write_model"](tmp_path / "model", 0)
    pq.write_table(pa.Table.from_pylist(SCRIPT["sums"]([(3, 9), (67, 68)])), tmp_path / "train.parquet")
    tokenizer = load_tokenizer(ModelConfig(str(tmp_path / "model")))
    data = ResponseDataset([str(tmp_path / "train.parquet")], DataConfig(train_files=[]), tokenizer)
    batch = data.batch([0, 1], [0, 1])
    assert data.texts([0, 1]) == ["03+09=", "67+68="]
    assert [tokenizer.decode(row) for row in batch["response_ids"].rows()] == ["21<eos>", "531<eos>"]
    assert [score(text, row["response"], row["answer"]) for text, row in zip(data.texts([0, 1]), data.rows([0, 1]))] == [1.0, 1.0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer) == 16 and model.config.num_hidden_layers == 2


def test_preferences_are_right_against_one_wrong_digit() -> None:
    train, _ = SCRIPT["split"](512, seed=0)
    rows = SCRIPT["preferences"](train[:500], random.Random(1))
    for (a, b), row in zip(train, rows):
        assert score(row["prompt"], row["chosen"], a + b) == 1.0 and row["prompt"] == f"{a:02d}+{b:02d}="
        assert len(row["rejected"]) == len(row["chosen"])
        assert sum(right != other for right, other in zip(row["chosen"], row["rejected"])) == 1
    labels = SCRIPT["labelled"](train[:500], random.Random(2))
    assert all(row["label"] == (row["response"] == chosen["chosen"]) for row, chosen in zip(labels, rows))
    assert 200 < sum(row["label"] for row in labels) < 300
