"""Given responses: single ones, preference pairs and labelled ones, of every format and every way they can be wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hybridflow.errors import DataError
from tests.data.test_chat import bos_tokenizer
from tests.data.test_prompts import CHAT, CHAT_TOKENIZER, TEMPLATE, TOKENIZER, hf_folder, jsonl, load, parquet
from tests.tiny import tiny_tokenizer

WRITERS = pytest.mark.parametrize("write", [jsonl, parquet, hf_folder])
PAIRS = [{"prompt": "1+2=", "chosen": "3", "rejected": "4"}, {"prompt": "10+20=", "chosen": "30<eos>", "rejected": "12"}]
LABELS = [{"prompt": "1+2=", "response": "3", "label": True}, {"prompt": "10+20=", "response": "31", "label": False}]
ANSWER = {"role": "assistant", "content": "3"}


def texts(batch, tokenizer=TOKENIZER) -> list[tuple[str, str]]:
    rows = zip(batch["prompt_ids"].rows(), batch["response_ids"].rows())
    return [(tokenizer.decode(prompt), tokenizer.decode(response)) for prompt, response in rows]


def test_responses_end_with_eos_once(tmp_path: Path) -> None:
    rows = [{"prompt": "1+2=", "response": "3"}, {"prompt": "2+2=", "response": "4<eos>"}, {"prompt": "10+2=", "response": "12"}]
    batch = load(jsonl(tmp_path, rows), kind="responses").batch([0, 1, 2], [0, 1, 2])
    assert texts(batch) == [("1+2=", "3<eos>"), ("2+2=", "4<eos>"), ("10+2=", "12<eos>")]
    assert batch["response_length"].tolist() == [2, 2, 3]


@pytest.mark.parametrize("kind", ["responses", "pairs", "labels"])
@pytest.mark.parametrize("form", ["<bos> $A", "<bos> $A <eos>"])
def test_special_tokens_of_the_tokenizer_are_of_the_whole_sequence(tmp_path: Path, kind: str, form: str) -> None:
    """One BOS, in front of the prompt; one EOS, at the end of the response: what the tokenizer adds to every text is not in between."""
    tokenizer = bos_tokenizer(TEMPLATE, form=form)
    answers = {"response": "3", "chosen": "3", "rejected": "4<eos>", "label": True}
    chat = {name: [{**ANSWER, "content": value}] if isinstance(value, str) else value for name, value in answers.items()}
    rows = [{"prompt": "1+2=", **answers}, {"prompt": CHAT, **chat}]
    batch = load(jsonl(tmp_path, rows), tokenizer, kind=kind).batch([0, 1], [0, 1])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows()):
        sequence = [*prompt.tolist(), *response.tolist()]
        assert sequence.count(bos) == sequence[:1].count(bos) and sequence.count(eos) == sequence[-1:].count(eos) == 1
    plain = [row.tolist() for row in batch["prompt_ids"].rows()][0]
    assert plain[0] == bos


@WRITERS
def test_a_pair_is_two_rows_of_one_unit(tmp_path: Path, write) -> None:
    batch = load(write(tmp_path, PAIRS), kind="pairs").batch([1, 0], [8, 9])
    assert texts(batch) == [("10+20=", "30<eos>"), ("10+20=", "12<eos>"), ("1+2=", "3<eos>"), ("1+2=", "4<eos>")]
    assert batch["unit"].tolist() == batch["prompt_id"].tolist() == [8, 8, 9, 9]
    assert batch["label"].tolist() == [1, 0, 1, 0] and batch["sample_index"].tolist() == [0, 1, 0, 1]
    assert batch["prompt_length"].tolist() == [6, 6, 4, 4] and "margin" not in batch


@WRITERS
def test_a_labelled_response_is_one_row(tmp_path: Path, write) -> None:
    data = load(write(tmp_path, LABELS), kind="labels")
    batch = data.batch([1, 0], [3, 4])
    assert texts(batch) == [("10+20=", "31<eos>"), ("1+2=", "3<eos>")]
    assert batch["label"].tolist() == [0, 1] and "unit" not in batch
    assert data.counts["desirable"] == 1


@WRITERS
def test_other_column_names_and_margins(tmp_path: Path, write) -> None:
    rows = [{"q": "1+2=", "good": "3", "bad": "4", "gap": 2}, {"q": "1+3=", "good": "4", "bad": "5", "gap": 0.5}]
    data = load(write(tmp_path, rows), kind="pairs", prompt_key="q", chosen_key="good", rejected_key="bad", margin_key="gap")
    assert data.batch([0, 1], [0, 1])["margin"].tolist() == [2, 2, 0.5, 0.5]
    labelled = load(jsonl(tmp_path, [{"prompt": "1+2=", "completion": "3", "ok": 1}], "l.jsonl"), kind="labels", response_key="completion",
                    label_key="ok")
    assert labelled.batch([0], [0])["label"].tolist() == [1]


EOS_TEMPLATE = TEMPLATE.replace("{{ m.content }}\n", "{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '' }}\n")


@WRITERS
@pytest.mark.parametrize("template", [TEMPLATE, EOS_TEMPLATE])
def test_chat_replies_are_what_the_template_writes_after_the_prompt(tmp_path: Path, write, template: str) -> None:
    """The same tokens as the whole chat rendered at once, up to the end token; the prompt may be repeated in front of a reply."""
    tokenizer = tiny_tokenizer(chat_template=template)
    rows = [{"prompt": CHAT, "chosen": [ANSWER], "rejected": [*CHAT, {**ANSWER, "content": "4"}]}]
    pairs = texts(load(write(tmp_path, rows), tokenizer, kind="pairs").batch([0], [0]), tokenizer)
    assert [prompt for prompt, _ in pairs] == ["user:1+2=\nassistant:"] * 2
    end = "<eos>" if "<eos>" in template else "\n<eos>"  # a template without an end token still gets one
    assert [response for _, response in pairs] == [f"3{end}", f"4{end}"]
    whole = tokenizer.apply_chat_template([*CHAT, ANSWER], tokenize=False)
    assert whole.startswith("".join(pairs[0]).removesuffix("<eos>"))


def test_a_string_prompt_made_a_message_takes_chat_replies(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"prompt": "1+2=", "response": [*CHAT, ANSWER]}])
    data = load(path, CHAT_TOKENIZER, kind="responses", apply_chat_template=True)
    assert texts(data.batch([0], [0]), CHAT_TOKENIZER)[0] == ("user:1+2=\nassistant:", "3\n<eos>")
    with pytest.raises(DataError, match=r"line 1: column 'response' holds chat messages, but the prompt is a plain string.*apply_chat"):
        load(path, CHAT_TOKENIZER, kind="responses")


@pytest.mark.parametrize("reply", [CHAT, [ANSWER, ANSWER], [*CHAT, ANSWER, CHAT[0]], [{"role": "system", "content": "x"}, ANSWER]])
def test_a_reply_is_one_assistant_message(tmp_path: Path, reply: list) -> None:
    with pytest.raises(DataError, match=r"data.jsonl, line 1: a response in chat messages is one assistant message.*roles \['"):
        load(jsonl(tmp_path, [{"prompt": CHAT, "response": reply}]), CHAT_TOKENIZER, kind="responses")


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match="line 1: the chat template writes the prompt in another way.*give the response as a string"):
        load(jsonl(tmp_path, [{"prompt": CHAT, "response": [ANSWER]}]), tokenizer, kind="responses")


@pytest.mark.parametrize(("kind", "row", "message"), [
    ("responses", {"prompt": "1+2=", "response": 3}, "column 'response' must be a string or chat messages, got int: 3"),
    ("pairs", {"prompt": "1+2=", "chosen": "3"}, r"the row lacks column 'rejected' \(data.rejected_key\)"),
    ("pairs", {"prompt": "1+2=", "chosen": "", "rejected": "4"}, "column 'chosen' is empty"),
    ("pairs", {"prompt": "1+2=", "chosen": "3", "rejected": {"x": 1}}, "column 'rejected' must be a string or chat messages, got dict"),
    ("labels", {"prompt": "1+2=", "response": "3", "label": "yes"}, r"column 'label' \(data.label_key\) must be true or false, got 'yes'"),
    ("labels", {"prompt": "1+2=", "response": "3", "label": 2}, "column 'label'.*got 2"),
    ("labels", {"prompt": "1+2=", "response": "3", "label": 0.5}, "column 'label'.*got 0.5"),
    ("labels", {"prompt": "1+2=", "response": "3", "label": None}, "column 'label' is empty"),
])
def test_one_bad_row_is_named_or_counted(tmp_path: Path, kind: str, row: dict, message: str) -> None:
    good = {"responses": {"prompt": "1+1=", "response": "2"}, "pairs": PAIRS[0], "labels": LABELS[0]}[kind]
    path = jsonl(tmp_path, [good, row])
    with pytest.raises(DataError, match=f"data.jsonl, line 2: .*{message}"):
        load(path, kind=kind)
    assert load(path, kind=kind, malformed_rows="skip").counts["malformed"] == 1


@pytest.mark.parametrize("margin", [True, "2", float("inf"), [1]])
def test_margins_are_finite_numbers(tmp_path: Path, margin: object) -> None:
    with pytest.raises(DataError, match=r"line 1: column 'gap' \(data.margin_key\) must be a finite number"):
        load(jsonl(tmp_path, [{**PAIRS[0], "gap": margin}]), kind="pairs", margin_key="gap")


@pytest.mark.parametrize(("kind", "missing"), [("responses", "response"), ("pairs", "chosen"), ("labels", "response")])
def test_a_missing_column_names_its_setting(tmp_path: Path, kind: str, missing: str) -> None:
    path = jsonl(tmp_path, [{"prompt": "1+2=", "completion": "3"}])
    with pytest.raises(DataError, match=rf"no column '{missing}'; the columns are \['completion', 'prompt'\]; set data.{missing}_key"):
        load(path, kind=kind, malformed_rows="skip")


def test_equal_responses_are_refused_or_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [PAIRS[0], {"prompt": "2+2=", "chosen": "4", "rejected": "4<eos>"}])
    with pytest.raises(DataError, match=r"line 2: 'chosen' and 'rejected' are the same 2 tokens: '4'.*malformed_rows=skip"):
        load(path, kind="pairs")
    data = load(path, kind="pairs", malformed_rows="skip")
    assert len(data) == 1 and data.counts["identical"] == 1


LONG = [{"prompt": "1+2=", "chosen": "3", "rejected": "333333"}, {"prompt": "1+3=", "chosen": "4", "rejected": "5"}]


def test_response_too_long(tmp_path: Path) -> None:
    path = jsonl(tmp_path, LONG)
    with pytest.raises(DataError, match=r"line 1: a response has 7 tokens, more than data.max_response_length=4.*right.*filter"):
        load(path, kind="pairs", max_response_length=4)
    assert load(path, kind="pairs", max_response_length=7).counts["truncated"] == 0  # the end token counts
    cut = load(path, kind="pairs", max_response_length=4, response_too_long="right")
    assert texts(cut.batch([0], [0]))[1][1] == "3333" and cut.counts["truncated"] == 1
    left = load(path, kind="pairs", max_response_length=4, response_too_long="filter")
    assert len(left) == 1 and left.counts["filtered"] == 1
    alike = jsonl(tmp_path, [{"prompt": "1+2=", "chosen": "34", "rejected": "35"}], "alike.jsonl")
    with pytest.raises(DataError, match="are the same 1 tokens"):
        load(alike, kind="pairs", max_response_length=1, response_too_long="right")


def test_labels_of_one_kind_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load(jsonl(tmp_path, LABELS[:1]), kind="labels")
    assert "every response has label=True" in caplog.text
