"""PromptDataset: rows of data files with tokenised prompts, checked in full before a run starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.config.schema import DataConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.data.chat import Messages, check_messages, encode_chats, encode_texts, render_chat
from hybridflow.data.reading import Row, read_files
from hybridflow.errors import DataError

log = logging.getLogger(__name__)

POLICIES = ("error", "left", "right", "filter")


@dataclass
class Prompt:
    """One usable row: the text the model sees (`messages`: the chat it was rendered from), its ids, and the row's other columns.

    responses, response_ids: given responses, one for each of the dataset's response columns. numbers: what else a loss reads.
    """

    text: str
    messages: Messages | None
    columns: dict[str, Any]
    place: str
    ids: list[int] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    response_ids: list[list[int]] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)


class PromptDataset:
    """The prompts of `files`, tokenised.

    A prompt is the column `data.prompt_key`: a string (with `data.apply_chat_template` rendered as one user message) or
    chat messages. Subclasses read given responses as well (responses.py, preferences.py).
    `counts`: rows read, kept, malformed, filtered, truncated.
    Raises DataError, naming file and row, for whatever cannot be used (rules: hybridflow/data/reading.py and DataConfig).
    """

    settings: tuple[str, ...] = ("prompt_key",)  # keys of DataConfig that name the columns a row must have

    def __init__(self, files: Sequence[str], data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        _check_settings(data)
        self.data, self.tokenizer = data, tokenizer
        found = read_files(files, skip_malformed=data.malformed_rows == "skip")
        self.counts = {"read": len(found.rows) + found.malformed, "malformed": found.malformed, "filtered": 0, "truncated": 0}
        for setting in self.settings:
            self._check_column(found.rows, setting)
        prompts = self._usable(found.rows)
        self._tokenize(prompts)
        self.prompts = self._limit_length(prompts)
        self.counts["kept"] = len(self.prompts)
        if not self.prompts:
            raise DataError(
                f"no usable prompt is left of {', '.join(files)} ({self._counted()}); see data.max_prompt_length and data.malformed_rows"
            )
        log.info("%s: %s", ", ".join(files), self._counted())

    def _counted(self) -> str:
        """The counts that are not zero, for people."""
        return ", ".join(f"{count:,} {name}" for name, count in self.counts.items() if count or name in ("read", "kept")) + " rows"

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, indices: Sequence[int], prompt_ids: Sequence[int]) -> Batch:
        """Columns prompt_id int64 [B] (the given instance ids), prompt_ids Ragged int64, prompt_length int64 [B]."""
        if len(indices) != len(prompt_ids):
            raise ValueError(f"{len(indices)} indices but {len(prompt_ids)} instance ids")
        tokens = Ragged.from_rows([self.prompts[i].ids for i in indices], torch.int64)
        return Batch({"prompt_id": torch.tensor(prompt_ids, dtype=torch.int64), "prompt_ids": tokens, "prompt_length": tokens.lengths})

    def texts(self, indices: Sequence[int]) -> list[str]:
        """The prompts as the model sees them: the string, or the rendered chat (before any truncation)."""
        return [self.prompts[i].text for i in indices]

    def chats(self, indices: Sequence[int]) -> list[Messages | None]:
        """The chat messages behind each prompt; None where it is a plain string."""
        return [self.prompts[i].messages for i in indices]

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Every column of the file but the prompt, as Python objects: what a reward function gets."""
        return [self.prompts[i].columns for i in indices]

    @cached_property
    def column_sets(self) -> dict[frozenset[str], str]:
        """The sets of columns that rows have beside the prompt (lines of JSON may differ), each with the place of its first row."""
        found: dict[frozenset[str], str] = {}
        for prompt in self.prompts:
            found.setdefault(frozenset(prompt.columns), prompt.place)
        return found

    def _check_column(self, rows: list[Row], setting: str) -> None:
        key = getattr(self.data, setting)
        if not any(key in row.values for row in rows):
            raise DataError(
                f"{rows[0].place}: there is no column {key!r}; the columns are {sorted(rows[0].values)}; "
                f"set data.{setting} to the one that holds the {setting.removesuffix('_key')}"
            )

    def _usable(self, rows: Iterable[Row]) -> list[Prompt]:
        prompts = []
        for row in rows:
            try:
                prompts.append(self._prompt(row))
            except DataError:
                if self.data.malformed_rows != "skip" or _lacks_template(row.values.get(self.data.prompt_key), self.data, self.tokenizer):
                    raise
                self.counts["malformed"] += 1
        return prompts

    def _prompt(self, row: Row) -> Prompt:
        value = self._field(row, "prompt_key")
        messages = None
        if isinstance(value, str) and self.data.apply_chat_template:
            messages = [{"role": "user", "content": value}]
        elif isinstance(value, list):
            messages = check_messages(value, row.place)
        elif not isinstance(value, str):
            raise DataError(
                f"{row.place}: column {self.data.prompt_key!r} must be a string or chat messages [{{role, content}}, ...], "
                f"got {type(value).__name__}: {value!r}"
            )
        text = value if messages is None else render_chat(self.tokenizer, messages, row.place)
        columns = {key: column for key, column in row.values.items() if key != self.data.prompt_key}
        return Prompt(text, messages, columns, row.place)

    def _field(self, row: Row, setting: str) -> Any:
        key = getattr(self.data, setting)
        if key not in row.values:
            raise DataError(f"{row.place}: the row lacks column {key!r} (data.{setting}); its columns are {sorted(row.values)}")
        value = row.values[key]
        if value is None or (isinstance(value, (str, list)) and not value):
            raise DataError(
                f"{row.place}: column {key!r} is empty ({value!r}); fill it, or set data.malformed_rows=skip to leave such rows out"
            )
        if not _is_unicode(value):
            raise DataError(
                f"{row.place}: column {key!r} holds half a surrogate pair, which is no character ({value!r}); correct it, or set "
                "data.malformed_rows=skip to leave such rows out"
            )
        return value

    def _tokenize(self, prompts: list[Prompt]) -> None:
        for is_chat, encode in ((False, encode_texts), (True, encode_chats)):
            group = [prompt for prompt in prompts if (prompt.messages is not None) == is_chat]
            for prompt, ids in zip(group, encode(self.tokenizer, [prompt.text for prompt in group]), strict=True):
                prompt.ids = ids
        for prompt in prompts:
            if not prompt.ids:
                raise DataError(f"{prompt.place}: {prompt.text!r} has no tokens with the tokenizer {self.tokenizer.name_or_path!r}")

    def _limit_length(self, prompts: list[Prompt]) -> list[Prompt]:
        limit, policy, kept = self.data.max_prompt_length, self.data.prompt_too_long, []
        for prompt in prompts:
            if len(prompt.ids) > limit:
                if policy == "error":
                    raise DataError(
                        f"{prompt.place}: the prompt has {len(prompt.ids)} tokens, more than data.max_prompt_length={limit}; "
                        "raise the limit, or set data.prompt_too_long to left (keep the last tokens), right (keep the first) "
                        "or filter (leave the row out)"
                    )
                self.counts["filtered" if policy == "filter" else "truncated"] += 1
                if policy == "filter":
                    continue
                prompt.ids = prompt.ids[-limit:] if policy == "left" else prompt.ids[:limit]
            kept.append(prompt)
        return kept


def _is_unicode(value: Any) -> bool:
    """Whether all text in it can be encoded. JSON can write half a surrogate pair ("\\ud800"), which no tokenizer takes."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def _lacks_template(prompt: Any, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> bool:
    """No template concerns every row: skipping malformed rows must not hide it."""
    return tokenizer.chat_template is None and (data.apply_chat_template or bool(prompt and isinstance(prompt, list)))


def _check_settings(data: DataConfig) -> None:
    if data.prompt_too_long not in POLICIES:
        raise DataError(f"data.prompt_too_long={data.prompt_too_long!r} is none of {', '.join(POLICIES)}")
    if data.malformed_rows not in ("error", "skip"):
        raise DataError(f"data.malformed_rows={data.malformed_rows!r} is none of error, skip")
    if data.max_prompt_length < 1:
        raise DataError(f"data.max_prompt_length={data.max_prompt_length} must be at least 1")
