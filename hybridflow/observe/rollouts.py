"""Sampled rollouts of a step: rollouts/step_000012.jsonl, one JSON object per response."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hybridflow.data.batch import FINISH_REASONS, Batch
from hybridflow.errors import DataError
from hybridflow.observe import strict_json
from hybridflow.observe.run_folder import write_atomic


@dataclass(frozen=True)
class Rollout:
    """One response as a person reads it. `columns` are columns of the data row, such as the answer.

    A column named like one of the fields is not written.
    """

    step: int
    prompt_id: int
    sample_index: int
    prompt: str
    response: str
    reward: float | None
    finish_reason: str
    columns: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        fields = {name: getattr(self, name) for name in _FIELDS}
        return strict_json.dumps({**self.columns, **fields})


_FIELDS = ("step", "prompt_id", "sample_index", "prompt", "response", "reward", "finish_reason")


def pick(prompt_ids: torch.Tensor, count: int, step: int) -> torch.Tensor:
    """Rows to show, at most `count` ([R] int64, ascending): different prompts first, other prompts and samples each step.

    prompt_ids: [B] int64 of the step's responses. A function of its arguments only.
    """
    rows_of: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompt_ids.tolist()):
        rows_of.setdefault(prompt, []).append(row)
    groups = [rows[step % len(rows):] + rows[: step % len(rows)] for rows in rows_of.values()]
    turn = step % len(groups) if groups else 0
    groups = groups[turn:] + groups[:turn]
    longest = max((len(rows) for rows in groups), default=0)
    ordered = [rows[i] for i in range(longest) for rows in groups if i < len(rows)]
    return torch.tensor(sorted(ordered[:count]), dtype=torch.int64)


def from_batch(batch: Batch, decode: Callable[[list[int]], str], step: int, answer_columns: Sequence[str] = ()) -> list[Rollout]:
    """Every row of a (small) batch as Rollout. `decode`: token ids -> text; `reward` may be missing."""
    prompts, responses = batch["prompt_ids"].rows(), batch["response_ids"].rows()
    rewards = batch["reward"].tolist() if "reward" in batch else [None] * len(batch)
    return [
        Rollout(
            step=step,
            prompt_id=int(batch["prompt_id"][row]),
            sample_index=int(batch["sample_index"][row]),
            prompt=decode(prompts[row].tolist()),
            response=decode(responses[row].tolist()),
            reward=rewards[row],
            finish_reason=FINISH_REASONS[int(batch["finish_reason"][row])],
            columns={name: _plain(batch[name][row]) for name in answer_columns},
        )
        for row in range(len(batch))
    ]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def write_rollouts(folder: str | os.PathLike[str], step: int, rollouts: Sequence[Rollout]) -> Path:
    """Writes folder/step_<step>.jsonl (making the folder), complete or not at all; returns its path."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"step_{step:06d}.jsonl"
    write_atomic(path, "".join(rollout.to_json() + "\n" for rollout in rollouts))
    return path


def read_rollouts(path: str | os.PathLike[str]) -> list[Rollout]:
    """The rollouts of a file. Raises DataError naming file and line where a line is none."""
    found = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                fields = {name: row.pop(name) for name in _FIELDS}
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{path}, line {number}: not a rollout ({type(error).__name__}: {error})") from error
            found.append(Rollout(**fields | {"reward": strict_json.number(fields["reward"])}, columns=row))
    return found


def describe(rollout: Rollout, width: int = 100) -> str:
    """A few lines for the console; long texts keep their ends (the beginning of a prompt and the end of a response matter least)."""
    reward = "" if rollout.reward is None else f"  reward {rollout.reward:g}"
    columns = "".join(f"  {name} {value}" for name, value in rollout.columns.items())
    return "\n".join([
        f"prompt {rollout.prompt_id}, sample {rollout.sample_index}{reward}  ({rollout.finish_reason}){columns}",
        f"  prompt    {_shorten(rollout.prompt, width)}",
        f"  response  {_shorten(rollout.response, width)}",
    ])


def _shorten(text: str, width: int) -> str:
    """One line; what is cut out of the middle is replaced by its number of characters."""
    line = text.replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")
    if len(line) <= width:
        return line
    head, tail = width // 3, width - width // 3
    return f"{line[:head]} ...({len(line) - head - tail} characters)... {line[-tail:]}"
