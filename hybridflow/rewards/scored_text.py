"""What a reward model reads: the actor's tokens where its tokenizer is the actor's, else its own tokens of the same text."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedTokenizerBase

from hybridflow.data.batch import FINISH_STOP, Batch, Ragged
from hybridflow.data.chat import Messages, encode_chats, encode_texts, render_conversation
from hybridflow.data.decode import decode_rows


class ScoredText:
    """Turns rows of a batch into the token ids of one reward model.

    With the actor's tokenizer and chat template: prompt_ids and response_ids as they are, the end token included. Otherwise
    the response is decoded and, where the reward model has a chat template, rendered with the prompt's messages (a plain
    prompt counts as one user message); without one, prompt and response are joined as text, and the end token follows a
    response that ended. Sequences above `limit` tokens lose their beginning.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, actor: PreTrainedTokenizerBase, limit: int, place: str) -> None:
        self.tokenizer, self.actor, self.limit, self.place = tokenizer, actor, limit, place
        self.same = same_tokenizer(tokenizer, actor)

    def rows(self, batch: Batch, texts: Mapping[int, str], chats: Mapping[int, Messages]) -> tuple[Batch, int]:
        """(Batch of prompt_ids and response_ids, whose last token is where the score is read; rows that were cut).

        batch: prompt_id, prompt_ids, response_ids, finish_reason. texts, chats: text and, where there are any, messages by prompt_id.
        """
        prompts, responses = batch["prompt_ids"], batch["response_ids"]
        if self.same and int((prompts.lengths + responses.lengths).max() if len(batch) else 0) <= self.limit:
            return batch.only("prompt_ids", "response_ids"), 0
        if self.same:
            rows = [torch.cat(pair).tolist() for pair in zip(prompts.rows(), responses.rows())]
        else:
            rows = self._own_tokens(batch, texts, chats)
        cut = sum(len(row) > self.limit for row in rows)
        rows = [row[-self.limit:] for row in rows]
        nothing = Ragged(torch.empty(0, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64))
        return Batch({"prompt_ids": Ragged.from_rows(rows, torch.int64), "response_ids": nothing}), cut

    def _own_tokens(self, batch: Batch, texts: Mapping[int, str], chats: Mapping[int, Messages]) -> list[list[int]]:
        ids = batch["prompt_id"].tolist()
        responses = decode_rows(self.actor, batch["response_ids"])
        if self.tokenizer.chat_template is not None:
            asked = {i: chats[i] if i in chats else [{"role": "user", "content": texts[i]}] for i in set(ids)}
            talks = [[*asked[i], {"role": "assistant", "content": response}] for i, response in zip(ids, responses)]
            return encode_chats(self.tokenizer, [render_conversation(self.tokenizer, talk, self.place) for talk in talks])
        rows = encode_texts(self.tokenizer, [texts[i] + response for i, response in zip(ids, responses)])
        end = self.tokenizer.eos_token_id
        stopped = (batch["finish_reason"] == FINISH_STOP).tolist()
        return [row + [end] if stop and end is not None and row[-1:] != [end] else row for row, stop in zip(rows, stopped)]


def same_tokenizer(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Whether both give every text, and every chat, the same ids."""
    if one.chat_template != other.chat_template:
        return False
    if one.is_fast and other.is_fast:
        return one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    return type(one) is type(other) and one.get_vocab() == other.get_vocab() and one.special_tokens_map == other.special_tokens_map
