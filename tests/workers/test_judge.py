"""A judge in a real vLLM engine that reads its own weights, against Hugging Face; and what counts as a verdict."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.sharded import ShardedBatch
from hybridflow.cluster.worker_group import RoleHandle
from hybridflow.config.layout import Layout
from hybridflow.config.reward_models import REWARD, JudgeConfig, scorers
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import DataError
from hybridflow.rewards.verdict import chat_text, question, verdict_score
from hybridflow.workers.judge import JudgeWorker
from tests.tiny import make_tiny_model, tiny_tokenizer

ACTOR = tiny_tokenizer()
PROMPT = "{{{answer}}} {prompt}{response}:"
TEXTS = {0: "1+1=", 1: "20*3=", 2: "{x}"}
ANSWERS = {0: {"answer": 2}, 1: {"answer": 60}, 2: {"answer": "-"}}
RESPONSES = ["2", "61", "(7)", "9 {}", "x" * 40]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("judge")
    config = Config()
    config.actor.model.path, config.actor.model.dtype = str(root / "actor"), "float32"
    ACTOR.save_pretrained(root / "actor")
    config.reward_models["j"] = {
        "kind": "judge", "model": {"path": make_tiny_model(Path(root, "judge"), hidden=128, layers=2, seed=3)}, "prompt": PROMPT,
        "pattern": "([0-9])", "highest": 8.0, "unparsed_reward": -1.0, "max_prompt_length": 24, "max_response_length": 6,
        "kv_cache_gib": 0.01, "max_num_seqs": 8}
    return config


@pytest.fixture(scope="module")
def judge(ray_cluster: Cluster, config: Config) -> Iterator[RoleHandle]:
    pool = ResourcePool([1], "cpu")
    arguments = {"config": config, "scorer": scorers(config, REWARD)["j"]}
    group = ray_cluster.worker_group({"j": (JudgeWorker, arguments)}, layout=Layout(1), pool=pool)
    yield group.role("j")
    group.close()
    pool.close()


@pytest.mark.slow
def test_verdicts_are_the_models_and_scores_are_theirs(judge: RoleHandle, config: Config) -> None:
    """Greedy verdicts equal Hugging Face's; a question that is too long is not asked, and no score is counted, never silent."""
    ids = torch.tensor([0, 0, 1, 2, 1])
    responses = Ragged.from_rows([ACTOR(text)["input_ids"] for text in RESPONSES], torch.int64)
    batch = Batch({"prompt_id": ids, "sample_index": torch.arange(5), "weight_version": torch.ones(5, dtype=torch.int64),
                   "response_ids": responses, "prompt_length": torch.ones(5, dtype=torch.int64), "response_length": responses.lengths})
    scored, (counts,) = judge.compute_score(ShardedBatch.from_batch(batch), texts={0: TEXTS[0], 2: TEXTS[2]},
                                            chats={1: [{"role": "user", "content": TEXTS[1]}]}, columns=ANSWERS).get()
    model = AutoModelForCausalLM.from_pretrained(config.reward_models["j"]["model"]["path"], dtype=torch.float32).eval()
    verdicts = []
    for i, response in zip(ids.tolist(), RESPONSES):
        asked = ACTOR(f"{{{ANSWERS[i]['answer']}}} {TEXTS[i]}{response}:", return_tensors="pt")["input_ids"]
        long = asked.shape[1] > 24
        made = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=6, do_sample=False)
        verdicts.append("" if long else ACTOR.decode(made[0, asked.shape[1]:], skip_special_tokens=True))
    assert scored.fetch("reward_model/j/verdict")["reward_model/j/verdict"] == verdicts and verdicts[-1] == ""
    digits = [[int(c) for c in verdict if c.isdigit()] for verdict in verdicts]
    expected = [float(found[-1]) if found and found[-1] <= 8 else -1.0 for found in digits]
    assert scored["reward_model/j"].tolist() == expected and len(set(expected)) > 1
    assert counts == {"unparsed": float(expected.count(-1.0)), "too_long": 1.0}


def test_the_default_verdict() -> None:
    judge = JudgeConfig()
    for verdict, score in (("Good. Score: 7", 7.0), ("score: 3 ... no.\nScore: 4.5", 4.5), ("Score: 11", None), ("Score: -1", None),
                           ("7", None), ("", None), ("Score: ten", None)):
        assert verdict_score(judge, verdict) == score, verdict


def test_a_chat_is_read_without_special_tokens() -> None:
    assert chat_text([{"role": "user", "content": "hello"}]) == "hello"
    assert chat_text([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]) == "system: be kind\n\nuser: hello"


def test_an_optional_group_that_did_not_match_is_no_score() -> None:
    assert verdict_score(JudgeConfig(pattern=r"yes|(\d)"), "3, yes") is None


def test_questions_hold_columns_and_their_braces_mean_nothing() -> None:
    judge = JudgeConfig(prompt="{prompt} {response} {gold} {{}}")
    assert question(judge, "{a}", "{response}", {"gold": "{0}", "prompt": "a column of this name"}, "here") == "{a} {response} {0} {}"
    with pytest.raises(DataError, match=r"here.prompt names \['gold'\], but the row has prompt, response and the columns \['answer'\]"):
        question(judge, "p", "r", {"answer": 1}, "here")
