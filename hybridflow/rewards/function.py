"""The contract of a reward function: how it is found, how it is called, and what it may return.

A function scores one response or a whole batch; which one, its parameter names decide:

    def reward(prompt: str, response: str, **columns) -> float | list[float] | dict | None     # or `async def`
    def reward(prompts: list[str], responses: list[str], **columns) -> list                    # columns: name -> list of values

For each response it returns a number, or a list with one number per response token, or a dict with that as `score` and
more numbers or texts, which become columns of the batch; None: it abstains (docs/rewards.md).

It gets the data columns it names (all of them with `**columns`), the keyword arguments of `reward.kwargs`, and, when it
names them, `finish_reason` ("stop" or "length") and `response_length` in tokens (`finish_reasons`, `response_lengths`
in a batched function). This module imports nothing heavy: every reward process loads it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridflow.errors import ConfigError

SHAPES = (
    "function(prompt: str, response: str, **columns) -> float or {'score': float, name: float, ...}, or batched: "
    "function(prompts: list[str], responses: list[str], **columns) -> list with one entry per response"
)
SINGLE = ("prompt", "response", "finish_reason", "response_length")
BATCHED = ("prompts", "responses", "finish_reasons", "response_lengths")
RESERVED = frozenset(SINGLE + BATCHED)  # data columns of these names never reach a reward function


@dataclass(frozen=True)
class Item:
    """One response to score. response_length: tokens, None when unknown."""

    prompt: str
    response: str
    columns: dict[str, Any]
    finish_reason: str = "stop"
    response_length: int | None = None


@dataclass(frozen=True)
class Signature:
    """What a reward function accepts. section: of its settings, "reward" or "cost"; required: parameters without default; named:
    all parameters but *args, **kwargs."""

    section: str
    batched: bool
    asynchronous: bool
    named: tuple[str, ...]
    required: tuple[str, ...]
    takes_all: bool

    @property
    def concurrent(self) -> bool:
        """Whether one process may have several calls in flight."""
        return self.asynchronous and not self.batched

    def problems(self, name: str, kwargs: dict[str, Any], columns: Sequence[str]) -> list[str]:
        """Why the function cannot be called with these fixed arguments and data columns; empty when it can."""
        problems = []
        unknown = sorted(set(kwargs) - set(self.named)) if not self.takes_all else []
        if unknown:
            problems.append(f"{self.section}.kwargs has {unknown}, which {name} does not accept; its parameters are {list(self.named)}")
        reserved = sorted(set(kwargs) & RESERVED)
        if reserved:
            problems.append(f"{self.section}.kwargs must not set {reserved}: hybridflow fills these")
        both = sorted(set(kwargs) & set(columns) & (set(columns) if self.takes_all else set(self.named)))
        if both:
            problems.append(f"{both} are data columns and in {self.section}.kwargs as well; rename one of them")
        missing = [p for p in self.required if p not in RESERVED and p not in kwargs and p not in columns]
        if missing:
            problems.append(
                f"{name} needs {missing}, but the data has the columns {sorted(columns)}; "
                f"add the column, set {self.section}.kwargs, or give the parameter a default"
            )
        return problems

    def arguments(self, items: Sequence[Item], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments for one call: of the only item, or of all items when batched (an absent value is None)."""
        columns = {name for item in items for name in item.columns} - RESERVED
        wanted = columns if self.takes_all else columns & set(self.named)
        if not self.batched:
            item = items[0]
            given = dict(zip(SINGLE, (item.prompt, item.response, item.finish_reason, item.response_length), strict=True))
            values = {name: item.columns[name] for name in wanted}
        else:
            given = dict(zip(BATCHED, (
                [i.prompt for i in items], [i.response for i in items], [i.finish_reason for i in items],
                [i.response_length for i in items],
            ), strict=True))
            values = {name: [item.columns.get(name) for item in items] for name in wanted}
        return {**kwargs, **values, **{name: value for name, value in given.items() if name in self.named}}


def signature_of(function: Callable, name: str, section: str) -> Signature:
    """Raises ConfigError, showing both contracts, when the parameter names fit neither."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{section}.function={name} has no readable signature ({error}); expected {SHAPES}") from error
    named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = {p.name for p in named}
    single, batched = names & set(SINGLE[:2]), names & set(BATCHED[:2])
    if len(single) + len(batched) != 2 or len(single) == 1:
        raise ConfigError(f"{section}.function={name} has the parameters {inspect.signature(function)}; expected {SHAPES}")
    return Signature(
        section=section, batched=bool(batched),
        asynchronous=any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None)))),
        named=tuple(p.name for p in named), required=tuple(p.name for p in named if p.default is p.empty),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters.values()),
    )


def load_function(path: str, section: str) -> Callable:
    """`package.module:name` or `path/file.py:name`, the value of `<section>.function`. Raises ConfigError naming what is missing; an
    exception raised while the module is imported is its cause."""
    setting = f"{section}.function={path}"
    source, separator, name = path.rpartition(":")
    if not separator or not source or not name:
        raise ConfigError(f"{setting} must be package.module:name or path/file.py:name")
    module = _load_file(Path(source), setting) if source.endswith(".py") else _load_module(source, setting)
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(n for n, value in vars(module).items() if callable(value) and getattr(value, "__module__", "") == module.__name__)
        raise ConfigError(f"{setting}: {source} has no function {name!r}; it has {found}")
    return function


def _load_module(source: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ImportError as error:
        problem = ConfigError(f"{setting}: cannot import {source}: {error}; is its folder on PYTHONPATH?")
        absent = isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}.")  # it, not what it imports
        raise problem from (None if absent else error)


def _load_file(file: Path, setting: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{setting}: there is no file {file.absolute()}")
    sys.path.insert(0, str(file.absolute().parent))  # the file may import its neighbours
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module
