"""What a reward model reads: the actor's tokens, or its own tokens of the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hybridflow.config.schema import ModelConfig
from hybridflow.data.batch import FINISH_LENGTH, FINISH_STOP, Batch, Ragged
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ModelError
from hybridflow.rewards.scored_text import ScoredText, same_tokenizer
from tests.data.test_chat import bos_tokenizer
from tests.tiny import tiny_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
ACTOR = tiny_tokenizer()
END = ACTOR.eos_token_id
PROMPTS = ["1+2=", "3*(4)="]
RESPONSES = ["3", "12 or so"]
CHATS = {1: [{"role": "system", "content": "be brief"}, {"role": "user", "content": "3*(4)="}]}
TEXTS = dict(enumerate(PROMPTS))


@pytest.fixture
def batch() -> Batch:
    """Two responses: one that ended, one that was cut off."""
    responses = [[*ACTOR(RESPONSES[0])["input_ids"], END], ACTOR(RESPONSES[1])["input_ids"]]
    return Batch({"prompt_id": torch.arange(2), "prompt_ids": Ragged.from_rows([ACTOR(p)["input_ids"] for p in PROMPTS], torch.int64),
                  "response_ids": Ragged.from_rows(responses, torch.int64), "finish_reason": torch.tensor([FINISH_STOP, FINISH_LENGTH])})


def read(tokenizer: PreTrainedTokenizerFast, batch: Batch, limit: int = 1000, chats: dict | None = None) -> tuple[list[list[int]], int]:
    rows, cut = ScoredText(tokenizer, ACTOR, limit, "reward_models.x").rows(batch, TEXTS, CHATS if chats is None else chats)
    return [torch.cat(pair).tolist() for pair in zip(rows["prompt_ids"].rows(), rows["response_ids"].rows())], cut


def test_the_actors_tokenizer_keeps_the_sampled_tokens(batch: Batch) -> None:
    """No way through text: tokens that decode to the same characters, and the end token, stay what they are."""
    expected = [torch.cat(pair).tolist() for pair in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows())]
    assert read(tiny_tokenizer(), batch) == (expected, 0)
    assert expected[0][-1] == END != expected[1][-1]


def test_another_tokenizer_reads_the_text(batch: Batch) -> None:
    other = tiny_tokenizer(vocab=60)
    rows, _ = read(other, batch)
    assert rows == [[*other(PROMPTS[0] + RESPONSES[0])["input_ids"], other.eos_token_id], other(PROMPTS[1] + RESPONSES[1])["input_ids"]]
    assert not same_tokenizer(other, ACTOR) and same_tokenizer(tiny_tokenizer(), ACTOR)


@pytest.mark.parametrize("vocab", [60, 101])
def test_a_chat_template_renders_messages_and_response(batch: Batch, vocab: int) -> None:
    """A template that the actor lacks makes another reader even of the same vocabulary."""
    other = tiny_tokenizer(vocab=vocab, chat_template=TEMPLATE)
    talks = [[{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": RESPONSES[0]}],
             [*CHATS[1], {"role": "assistant", "content": RESPONSES[1]}]]
    assert read(other, batch)[0] == [other.apply_chat_template(talk, tokenize=True, return_dict=False) for talk in talks]


@pytest.mark.parametrize("template", [None, "{{ bos_token }}" + TEMPLATE])
@pytest.mark.parametrize("form", ["<bos> $A", "<bos> $A <eos>"])
def test_one_bos_in_front_and_an_end_only_where_there_was_one(batch: Batch, template: str | None, form: str) -> None:
    """Whatever the tokenizer adds by itself and the template writes: the second response was cut off."""
    other = bos_tokenizer(template, vocab=60, form=form)
    rows, _ = read(other, batch)
    assert all(row.count(other.bos_token_id) == 1 and row[0] == other.bos_token_id for row in rows)
    assert [row.count(other.eos_token_id) for row in rows] == ([1, 0] if template is None else [0, 0])


@pytest.mark.parametrize("tokenizer", [ACTOR, tiny_tokenizer(vocab=60)])
def test_a_long_text_keeps_its_end_and_is_counted(batch: Batch, tokenizer: PreTrainedTokenizerFast) -> None:
    whole, _ = read(tokenizer, batch)
    rows, cut = read(tokenizer, batch, limit=8)
    assert rows == [row[-8:] for row in whole] and cut == sum(len(row) > 8 for row in whole) == 1


def test_no_rows() -> None:
    none = Ragged(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    empty = Batch({"prompt_id": none.values, "prompt_ids": none, "response_ids": none, "finish_reason": none.values})
    for tokenizer in (ACTOR, tiny_tokenizer(vocab=60)):
        assert read(tokenizer, empty) == ([], 0)


def test_a_missing_tokenizer_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    """Never zeros: without a tokenizer a reward model cannot read anything."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for model in (ModelConfig(path=str(tmp_path)), ModelConfig(path=str(tmp_path), tokenizer_path=str(tmp_path / "absent"))):
        with pytest.raises(ModelError, match="reward_models.helpful.model.tokenizer_path"):
            load_tokenizer(model, "reward_models.helpful.model")
