"""Preference data: pairs of a better and a worse response (DPO, reward model), or responses labelled good or bad (KTO)."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from hybridflow.data.batch import Batch
from hybridflow.data.prompts import Prompt, PromptDataset
from hybridflow.data.reading import Row
from hybridflow.data.responses import ResponseDataset
from hybridflow.errors import DataError

log = logging.getLogger(__name__)


class PairDataset(ResponseDataset):
    """Prompts with the two responses of the columns `data.chosen_key` and `data.rejected_key`.

    `data.margin_key` names a column that says how much better the chosen response is (a number). Equal responses are
    refused, or with data.malformed_rows=skip left out (`counts["identical"]`).
    """

    settings = ("prompt_key", "chosen_key", "rejected_key")
    response_settings = ("chosen_key", "rejected_key")

    def batch(self, indices: Sequence[int], prompt_ids: Sequence[int]) -> Batch:
        """ResponseDataset's columns with two rows for each index, chosen then rejected; and int64 [B] sample_index (0, 1), label
        (1 chosen, 0 rejected), unit (the pair), and margin float32 [B] where data.margin_key is set."""
        batch = super().batch(indices, prompt_ids)
        index_B = torch.arange(len(batch)) % 2
        columns = {"sample_index": index_B, "label": 1 - index_B, "unit": batch["prompt_id"]}
        if self.data.margin_key is not None:
            margins = torch.tensor([self.prompts[i].numbers["margin"] for i in indices], dtype=torch.float32)
            columns["margin"] = margins.repeat_interleave(2)
        return batch.with_columns(**columns)

    def _prompt(self, row: Row) -> Prompt:
        prompt = super()._prompt(row)
        if self.data.margin_key is not None:
            prompt.numbers["margin"] = self._margin(row)
        return prompt

    def _margin(self, row: Row) -> float:
        value = self._field(row, "margin_key")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise DataError(f"{row.place}: column {self.data.margin_key!r} (data.margin_key) must be a finite number, got {value!r}")
        return float(value)

    def _limit_length(self, prompts: list[Prompt]) -> list[Prompt]:
        self.counts["identical"] = 0
        return [prompt for prompt in super()._limit_length(prompts) if self._differs(prompt)]

    def _differs(self, prompt: Prompt) -> bool:
        chosen, rejected = prompt.response_ids
        if chosen != rejected:
            return True
        if self.data.malformed_rows != "skip":
            raise DataError(
                f"{prompt.place}: {self.data.chosen_key!r} and {self.data.rejected_key!r} are the same {len(chosen)} tokens: "
                f"{prompt.responses[0]!r}; such a pair says nothing; correct it, or set data.malformed_rows=skip to leave such rows out"
            )
        self.counts["identical"] += 1
        return False


class LabelledDataset(ResponseDataset):
    """Prompts with the response of `data.response_key` and, in `data.label_key`, whether it is desirable (true, false, 1 or 0)."""

    settings = ("prompt_key", "response_key", "label_key")

    def batch(self, indices: Sequence[int], prompt_ids: Sequence[int]) -> Batch:
        """ResponseDataset's columns, and label int64 [B] (1 desirable, 0 undesirable)."""
        labels = torch.tensor([int(self.prompts[i].numbers["label"]) for i in indices], dtype=torch.int64)
        return super().batch(indices, prompt_ids).with_columns(label=labels)

    def _prompt(self, row: Row) -> Prompt:
        prompt = super()._prompt(row)
        value = self._field(row, "label_key")
        if not isinstance(value, (bool, int)) or value not in (0, 1):
            raise DataError(f"{row.place}: column {self.data.label_key!r} (data.label_key) must be true or false, got {value!r}")
        prompt.numbers["label"] = float(value)
        return prompt

    def _limit_length(self, prompts: list[Prompt]) -> list[Prompt]:
        kept = super()._limit_length(prompts)
        desirable = self.counts["desirable"] = int(sum(prompt.numbers["label"] for prompt in kept))
        if kept and desirable in (0, len(kept)):
            log.warning("every response has %s=%s: nothing shows what the other kind is like", self.data.label_key, bool(desirable))
        return kept


DATASETS: dict[str, type[PromptDataset]] = {
    "prompts": PromptDataset, "responses": ResponseDataset, "pairs": PairDataset, "labels": LabelledDataset,
}
