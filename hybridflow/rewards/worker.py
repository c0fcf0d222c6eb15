"""The reward process: loads the function once and scores what it is sent, in its main thread.

Verifiers may use signal.alarm, which works in the main thread of a process only. The process ends when the other end of
its pipe closes; a call that outlives its time-out is killed from outside (rewards/process.py), and by faulthandler's
own thread should the controller have died meanwhile.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.rewards.function import Item, Signature, load_function, signature_of
from hybridflow.rewards.result import BadShape, BadValue, Score, parse_batched, parse_single

ORPHAN_GRACE_SECONDS = 10.0
ASYNC_GRACE_SECONDS = 1.0  # a coroutine that ignores its cancellation for so long is killed with its process


@dataclass(frozen=True)
class Failure:
    """Why there is no score. contract: the returned value has a shape that fits no response. whole: it concerns every
    response of the call, not this one."""

    message: str
    contract: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Ready:
    """The function is loaded, or could not be."""

    signature: Signature | None
    problem: str = ""


@dataclass(frozen=True)
class TimedOut:
    """The call was ended by the clock."""


TIMED_OUT = TimedOut()
Outcome = Score | Failure | TimedOut


class Scorer:
    """The loaded function and how to call it. timeout: seconds each coroutine of an asynchronous function may take (calls that
    do not yield are ended from outside)."""

    def __init__(self, section: str, path: str, kwargs: dict[str, Any], timeout: float) -> None:
        self.function: Callable = load_function(path, section)
        self.signature = signature_of(self.function, path, section)
        self.kwargs, self.timeout = kwargs, timeout
        self.runner = asyncio.Runner() if self.signature.asynchronous else None  # one event loop, so that clients stay open between calls

    def groups(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Items of one call each (of several calls in flight at once for an asynchronous function)."""
        return [items] if self.signature.batched or self.signature.concurrent else [[item] for item in items]

    def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item of a group."""
        if self.signature.batched:
            return self._batch(items)
        if self.runner is not None:
            return self.runner.run(self._together(items))
        try:
            value = self.function(**self.signature.arguments(items, self.kwargs))
        except BaseException as error:  # whatever the user's code raises, SystemExit included, is the report
            return [Failure("raised " + _traceback(error))]
        return [_outcome(value, items[0])]

    def _batch(self, items: Sequence[Item]) -> list[Outcome]:
        try:
            value = self.function(**self.signature.arguments(items, self.kwargs))
            value = self.runner.run(value) if self.runner is not None else value
        except BaseException as error:
            return [Failure("raised " + _traceback(error), whole=True)] * len(items)
        try:
            rows = parse_batched(value, items)
        except BadShape as error:
            return [Failure(str(error), contract=True, whole=True)] * len(items)
        return [Failure(str(row)) if isinstance(row, BadValue) else row for row in rows]

    async def _together(self, items: Sequence[Item]) -> list[Outcome]:
        return await asyncio.gather(*(self._coroutine(item) for item in items))

    async def _coroutine(self, item: Item) -> Outcome:
        clock = asyncio.timeout(self.timeout)
        try:
            async with clock:
                value = await self.function(**self.signature.arguments([item], self.kwargs))
        except BaseException as error:
            return TIMED_OUT if clock.expired() else Failure("raised " + _traceback(error))
        return _outcome(value, item)


def _outcome(value: Any, item: Item) -> Outcome:
    try:
        return parse_single(value, item)
    except BadShape as error:
        return Failure(str(error), contract=True)
    except BadValue as error:
        return Failure(str(error))


def _traceback(error: BaseException) -> str:
    """The traceback below our own frames and importlib's, ending with the exception; of an error of ours the message says it all."""
    if isinstance(error, HybridFlowError):
        return f"{type(error).__name__}: {error}"
    frames = error.__traceback__
    while frames is not None and _is_machinery(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()


def _is_machinery(file: str) -> bool:
    """Code between the process and the user's module."""
    return file in (__file__, load_function.__code__.co_filename, importlib.__file__) or file.startswith("<frozen importlib")


def serve(descriptor: int) -> None:
    """Main loop. First message: (section, path, kwargs, time-out in seconds); then lists of Item; each item (or the whole list,
    for a batched or an asynchronous function) is answered on its own, so that the controller knows which one hangs."""
    pipe = Connection(descriptor)
    try:
        section, path, kwargs, timeout = pipe.recv()
        scorer = _load(pipe, section, path, kwargs, timeout)
        while scorer is not None:
            items = pipe.recv()
            for group in scorer.groups(items):
                faulthandler.dump_traceback_later(timeout + ORPHAN_GRACE_SECONDS, exit=True)
                outcomes = scorer.score(group)
                faulthandler.cancel_dump_traceback_later()
                pipe.send(outcomes)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the controller closed the pool or died
    os._exit(0)  # threads a reward function left behind must not keep the process


def _load(pipe: Connection, section: str, path: str, kwargs: dict[str, Any], timeout: float) -> Scorer | None:
    try:
        scorer = Scorer(section, path, kwargs, timeout)
    except ConfigError as error:
        cause = f"\n{_traceback(error.__cause__)}" if error.__cause__ is not None else ""
        pipe.send(Ready(None, f"{error}{cause}"))
        return None
    except BaseException as error:  # the user's module raised while it was imported
        pipe.send(Ready(None, f"{section}.function={path} cannot be loaded; importing it raised {_traceback(error)}"))
        return None
    pipe.send(Ready(scorer.signature))
    return scorer
