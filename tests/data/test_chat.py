"""Tokenizers, templates and the beginning-of-sequence token."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from hybridflow.config.schema import ModelConfig
from hybridflow.data.char_tokenizer import char_tokenizer
from hybridflow.data.chat import encode_chats, encode_texts, render_chat
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import DataError, ModelError
from tests.tiny import make_tiny_model, tiny_tokenizer

WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}{{ m.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "12"}]


def bos_tokenizer(template: str | None = None, vocab: int = 101, form: str = "<bos> $A") -> PreTrainedTokenizerFast:
    """A tokenizer that puts BOS in front by itself, as Llama's does. form: what it makes of a text."""
    tokenizer = tiny_tokenizer(vocab, template)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=form, special_tokens=[("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    )
    return tokenizer


def test_template_with_bos_and_tokenizer_with_bos_give_one() -> None:
    tokenizer = bos_tokenizer(WITH_BOS)
    text = render_chat(tokenizer, CHAT, "row")
    assert tokenizer(text)["input_ids"][:2] == [2, 2]  # the trap: tokenising the rendered text with defaults
    assert encode_chats(tokenizer, [text]) == [[2, *tiny_tokenizer()("12")["input_ids"]]]


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_chat_ids_equal_apply_chat_template(template: str) -> None:
    for tokenizer in (bos_tokenizer(template), tiny_tokenizer(chat_template=template)):
        expected = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert encode_chats(tokenizer, [render_chat(tokenizer, CHAT, "row")]) == [expected]


def test_plain_strings_follow_the_tokenizer_and_never_have_two() -> None:
    digits = tiny_tokenizer()("12")["input_ids"]
    assert encode_texts(bos_tokenizer(WITH_BOS), ["12", "<bos>12"]) == [[2, *digits], [2, *digits]]
    assert encode_texts(tiny_tokenizer(), ["12", "<bos>12"]) == [digits, [2, *digits]]


def test_an_end_that_the_tokenizer_adds_is_no_part_of_a_prompt() -> None:
    """The model would go on after an end. One that the text has itself stays."""
    digits, both = tiny_tokenizer()("12")["input_ids"], bos_tokenizer(form="<bos> $A <eos>")
    assert both("12")["input_ids"] == [2, *digits, 1], "the trap"
    assert encode_texts(both, ["12", "12<eos>"]) == [[2, *digits], [2, *digits, 1]]
    assert encode_texts(tiny_tokenizer(), ["12", "12<eos>"]) == [digits, [*digits, 1]]


def test_tokenizer_with_a_template_file(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", layers=1)
    (tmp_path / "chat.jinja").write_text("Q:" + WITHOUT_BOS)
    assert load_tokenizer(ModelConfig(path)).chat_template is None
    tokenizer = load_tokenizer(ModelConfig(path, chat_template=str(tmp_path / "chat.jinja")))
    assert render_chat(tokenizer, CHAT, "row") == "Q:12"
    with pytest.raises(DataError, match=r"actor.model.chat_template=absent.jinja cannot be read"):
        load_tokenizer(ModelConfig(path, chat_template="absent.jinja"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no tokenizer in .*empty.*actor.model.tokenizer_path"):
        load_tokenizer(ModelConfig(str(tmp_path / "empty")))
    (tmp_path / "empty/tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no tokenizer in .*empty.*copy its files again"):
        load_tokenizer(ModelConfig(str(tmp_path / "empty")))
    (tmp_path / "empty/tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer folder no/such does not exist"):
        load_tokenizer(ModelConfig("no/such"))
    assert load_tokenizer(ModelConfig(str(tmp_path / "empty"), tokenizer_path=path)).eos_token_id == 1


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_char_tokenizer_survives_saving(tmp_path: Path, family: str) -> None:
    path = make_tiny_model(tmp_path, family, layers=1)
    text = "12+3= ab\n(C)"
    for tokenizer in (load_tokenizer(ModelConfig(path)), tiny_tokenizer()):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text) and tokenizer.decode(ids) == text and len(tokenizer) == 101
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)


@pytest.mark.parametrize(("characters", "size", "message"), [("aa", None, "repeat"), ("abc", 6, "do not fit"), ("é", None, "ASCII")])
def test_char_tokenizer_refuses(characters: str, size: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        char_tokenizer(characters, vocab_size=size)
