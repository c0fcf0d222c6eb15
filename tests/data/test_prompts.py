"""Prompt files of every format and every way they can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridflow.config.schema import DataConfig
from hybridflow.data.preferences import DATASETS
from hybridflow.data.prompts import PromptDataset
from hybridflow.errors import DataError
from tests.tiny import tiny_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
TOKENIZER = tiny_tokenizer()
CHAT_TOKENIZER = tiny_tokenizer(chat_template=TEMPLATE)
ROWS = [{"prompt": "1+2=", "answer": 3, "meta": {"level": [1, 2]}}, {"prompt": "10+20=", "answer": 30, "meta": {"level": []}}]
CHAT = [{"role": "user", "content": "1+2="}]


def jsonl(folder: Path, rows: list, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(path)


def parquet(folder: Path, rows: list[dict]) -> str:
    path = folder / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def hf_folder(folder: Path, rows: list[dict]) -> str:
    path = folder / "hf"
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


def load(path: str | list[str], tokenizer=TOKENIZER, kind: str = "prompts", **settings) -> PromptDataset:
    return DATASETS[kind]([path] if isinstance(path, str) else path, DataConfig(train_files=[], **settings), tokenizer)


@pytest.mark.parametrize("write", [jsonl, parquet, hf_folder])
def test_formats_give_the_same_prompts_and_columns(tmp_path: Path, write) -> None:
    data = load(write(tmp_path, ROWS))
    batch = data.batch([1, 0], [7, 8])
    assert [TOKENIZER.decode(row) for row in batch["prompt_ids"].rows()] == ["10+20=", "1+2="]
    assert batch["prompt_id"].tolist() == [7, 8] and batch["prompt_length"].tolist() == [6, 4]
    assert data.rows([0, 1]) == [{"answer": 3, "meta": {"level": [1, 2]}}, {"answer": 30, "meta": {"level": []}}]
    assert data.texts([0]) == ["1+2="]


@pytest.mark.parametrize("write", [jsonl, parquet, hf_folder])
def test_chat_messages_are_rendered_with_the_template(tmp_path: Path, write) -> None:
    # The second row makes columnar files fill tool_calls=None into the first: templates must not see it.
    rows = [{"prompt": [{"role": "system", "content": "Add."}, *CHAT]}, {"prompt": [{**CHAT[0], "tool_calls": "x"}]}]
    data = load(write(tmp_path, rows), CHAT_TOKENIZER)
    assert data.texts([0]) == ["system:Add.\nuser:1+2=\nassistant:"]
    expected = CHAT_TOKENIZER.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert data.batch([0], [0])["prompt_ids"].values.tolist() == expected


def test_absent_message_keys_stay_absent(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT}, {"prompt": [{**CHAT[0], "tool_calls": "x"}]}]
    tokenizer = tiny_tokenizer(chat_template="{% for m in messages %}{{ 'tools' if m.tool_calls is defined else 'plain' }}{% endfor %}")
    assert load(parquet(tmp_path, rows), tokenizer).texts([0, 1]) == ["plain", "tools"]


def test_string_prompt_as_user_message(tmp_path: Path) -> None:
    assert load(jsonl(tmp_path, ROWS), CHAT_TOKENIZER, apply_chat_template=True).texts([0]) == ["user:1+2=\nassistant:"]
    assert load(jsonl(tmp_path, ROWS), CHAT_TOKENIZER).texts([0]) == ["1+2="]


def test_several_files_keep_their_order(tmp_path: Path) -> None:
    data = load([jsonl(tmp_path, ROWS[1:], "b.jsonl"), jsonl(tmp_path, ROWS[:1], "a.json")])
    assert data.texts([0, 1]) == ["10+20=", "1+2="] and len(data) == 2


def test_no_chat_template_names_the_setting(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [{"prompt": CHAT}])
    with pytest.raises(DataError, match=r"data.jsonl, line 1.*actor.model.chat_template"):
        load(path)
    with pytest.raises(DataError, match="actor.model.chat_template"):
        load(path, malformed_rows="skip")  # concerns all rows: not something to skip
    assert len(load(jsonl(tmp_path, ROWS))) == 2  # plain strings need none


def test_template_that_refuses_the_messages(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"line 1: the chat template refuses these messages: roles must alternate"):
        load(jsonl(tmp_path, [{"prompt": CHAT}]), tokenizer)


@pytest.mark.parametrize("messages", [["hello"], [{"role": "user"}], [{"content": "x"}], [{"role": 3, "content": "x"}]])
def test_messages_that_are_none(tmp_path: Path, messages: list) -> None:
    with pytest.raises(DataError, match=r"line 1: a chat message needs `role` and `content`"):
        load(jsonl(tmp_path, [{"prompt": messages}]), CHAT_TOKENIZER)


LONG = [{"prompt": "12+3="}, {"prompt": "1234+5678="}]


def test_prompt_too_long_error_names_the_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.jsonl, line 2: the prompt has 10 tokens, .*max_prompt_length=8.*left.*right.*filter"):
        load(jsonl(tmp_path, LONG), max_prompt_length=8)


@pytest.mark.parametrize(("policy", "text"), [("left", "34+5678="), ("right", "1234+567")])
def test_prompt_too_long_truncated(tmp_path: Path, policy: str, text: str) -> None:
    data = load(jsonl(tmp_path, LONG), max_prompt_length=8, prompt_too_long=policy)
    assert TOKENIZER.decode(data.batch([1], [0])["prompt_ids"].values) == text
    assert data.counts == {"read": 2, "malformed": 0, "filtered": 0, "truncated": 1, "kept": 2}


def test_prompt_too_long_filtered_and_counted(tmp_path: Path) -> None:
    data = load(jsonl(tmp_path, LONG), max_prompt_length=8, prompt_too_long="filter")
    assert data.texts([0]) == ["12+3="] and len(data) == 1 and data.counts["filtered"] == 1
    with pytest.raises(DataError, match=r"no usable prompt is left.*2 filtered"):
        load(jsonl(tmp_path, LONG), max_prompt_length=1, prompt_too_long="filter")


BAD_LINES = ['{"prompt": "a"', "[1, 2]", "3", "\"text\"", '{"prompt": NULL}']


@pytest.mark.parametrize("line", BAD_LINES)
def test_malformed_json_line(tmp_path: Path, line: str) -> None:
    path = jsonl(tmp_path, [*ROWS, line, ROWS[0]])
    with pytest.raises(DataError, match=r"data.jsonl, line 3: .*data.malformed_rows=skip"):
        load(path)
    data = load(path, malformed_rows="skip")
    assert len(data) == 3 and data.counts["malformed"] == 1 and data.counts["read"] == 4


def test_line_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "\xff"}\n')  # byte order mark and blank lines are fine
    with pytest.raises(DataError, match="line 3: not valid JSON"):
        load(str(path))


@pytest.mark.parametrize("write", [jsonl, parquet, hf_folder])
def test_missing_column_lists_columns_and_setting(tmp_path: Path, write) -> None:
    path = write(tmp_path, [{"question": "1+1", "answer": "2"}])
    for policy in ("error", "skip"):
        with pytest.raises(DataError, match=r"no column 'prompt'; the columns are \['answer', 'question'\]; set data.prompt_key"):
            load(path, malformed_rows=policy)
    with pytest.raises(DataError, match=r"no column 'response'.*set data.response_key"):
        load(path, prompt_key="question", kind="responses")
    assert load(path, prompt_key="question").texts([0]) == ["1+1"]


@pytest.mark.parametrize(("row", "message"), [
    ({"answer": 1}, "the row lacks column 'prompt'"),
    ({"prompt": ""}, "column 'prompt' is empty"),
    ({"prompt": "a\ud800"}, r"column 'prompt' holds half a surrogate pair.*data.malformed_rows=skip"),
    ({"prompt": None}, "column 'prompt' is empty"),
    ({"prompt": []}, "column 'prompt' is empty"),
    ({"prompt": 7}, ".*must be a string or chat messages.*got int: 7"),
    ({"prompt": {"role": "user", "content": "x"}}, ".*must be a string or chat messages.*got dict"),
])
def test_one_bad_row(tmp_path: Path, row: dict, message: str) -> None:
    path = jsonl(tmp_path, [ROWS[0], row])
    with pytest.raises(DataError, match=f"data.jsonl, line 2: {message}"):
        load(path)
    assert load(path, malformed_rows="skip").counts["malformed"] == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "table.csv").write_text("prompt\n1+1")
    (tmp_path / "folder").mkdir()
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    for name, message in [
        ("empty.jsonl", "holds no rows"), ("bad.parquet", "not a readable parquet file"),
        ("table.csv", r"unknown format '.csv'; supported"),
        ("folder", "not one written by datasets.Dataset.save_to_disk"), ("absent.jsonl", "does not exist"),
        ("splits", r"holds the splits \['train'\]; name one"),
    ]:
        with pytest.raises(DataError, match=message) as error:
            load(str(tmp_path / name))
        assert str(tmp_path / name) in str(error.value)
    with pytest.raises(DataError, match="no data file given: set data.train_files"):
        load([])
    assert len(load(str(tmp_path / "splits" / "train"))) == 2


def test_unknown_policies(tmp_path: Path) -> None:
    path = jsonl(tmp_path, ROWS)
    for settings, message in [
        ({"prompt_too_long": "middle"}, "prompt_too_long='middle' is none of error, left, right, filter"),
        ({"malformed_rows": "drop"}, "malformed_rows='drop' is none of error, skip"), ({"max_prompt_length": 0}, "max_prompt_length=0"),
    ]:
        with pytest.raises(DataError, match=message):
            load(path, **settings)


def test_batch_refuses_ids_that_do_not_match(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 indices but 1 instance ids"):
        load(jsonl(tmp_path, ROWS)).batch([0, 1], [0])
