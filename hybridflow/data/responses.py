"""ResponseDataset: prompts with given responses to train on, as token ids that end like a generated response does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridflow.data.batch import Batch, Ragged
from hybridflow.data.chat import check_messages, encode_chats, render_reply
from hybridflow.data.prompts import Prompt, PromptDataset
from hybridflow.data.reading import Row
from hybridflow.errors import DataError


class ResponseDataset(PromptDataset):
    """Prompts with the response of the column `data.response_key` (SFT).

    A response is a string, or chat messages that answer a chat prompt; its ids end with the EOS token, unless
    `data.response_too_long=right` cut them.
    """

    settings = ("prompt_key", "response_key")
    response_settings: tuple[str, ...] = ("response_key",)  # in the order of a prompt's rows in a batch

    def batch(self, indices: Sequence[int], prompt_ids: Sequence[int]) -> Batch:
        """PromptDataset's columns, a row for every response, prompt-major; and response_ids Ragged int64, response_length int64 [B]."""
        copies = len(self.response_settings)
        prompts = super().batch(*([value for value in values for _ in range(copies)] for values in (indices, prompt_ids)))
        responses = Ragged.from_rows([ids for i in indices for ids in self.prompts[i].response_ids], torch.int64)
        return prompts.with_columns(response_ids=responses, response_length=responses.lengths)

    def _prompt(self, row: Row) -> Prompt:
        prompt = super()._prompt(row)
        prompt.responses = [self._response(row, prompt, setting) for setting in self.response_settings]
        return prompt

    def _response(self, row: Row, prompt: Prompt, setting: str) -> str:
        value, key = self._field(row, setting), getattr(self.data, setting)
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise DataError(f"{row.place}: column {key!r} must be a string or chat messages, got {type(value).__name__}: {value!r}")
        if prompt.messages is None:
            raise DataError(
                f"{row.place}: column {key!r} holds chat messages, but the prompt is a plain string: {prompt.text!r}; give the prompt as "
                "messages too, or set data.apply_chat_template=true to make it a user message"
            )
        return render_reply(self.tokenizer, prompt.messages, check_messages(value, row.place), row.place)

    def _tokenize(self, prompts: list[Prompt]) -> None:
        super()._tokenize(prompts)
        encoded = iter(encode_chats(self.tokenizer, [text for prompt in prompts for text in prompt.responses]))
        for prompt in prompts:
            prompt.response_ids = [self._end(next(encoded)) for _ in prompt.responses]

    def _end(self, ids: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError(f"the tokenizer {self.tokenizer.name_or_path!r} has no EOS token, so responses could not end; give it one")
        return ids if ids[-1:] == [eos] else [*ids, eos]

    def _limit_length(self, prompts: list[Prompt]) -> list[Prompt]:
        return [prompt for prompt in super()._limit_length(prompts) if self._fits(prompt)]

    def _fits(self, prompt: Prompt) -> bool:
        """Applies data.response_too_long; False: the row is left out."""
        limit, policy = self.data.max_response_length, self.data.response_too_long
        longest = max(len(ids) for ids in prompt.response_ids)
        if longest <= limit:
            return True
        if policy == "error":
            raise DataError(
                f"{prompt.place}: a response has {longest} tokens, more than data.max_response_length={limit}; raise the limit, or set "
                "data.response_too_long to right (keep the first tokens, without an end) or filter (leave the row out)"
            )
        self.counts["filtered" if policy == "filter" else "truncated"] += 1
        prompt.response_ids = [ids[:limit] for ids in prompt.response_ids]
        return policy != "filter"
