"""The reward process: loads the function once and scores what it is sent, in its main thread.

Verifiers may use signal.alarm, which works in the main thread of a process only. The process ends when the other end of
its pipe closes; a call that outlives its time-out is killed from outside (rewards/process.py), and by faulthandler's
own thread should the controller have died meanwhile.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.function import Item, Signature, load_function, signature_of
from hybridflow.rewards.result import BadShape, BadValue, Score, parse_batched, parse_single

ORPHAN_GRACE_SECONDS = 10.0


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


Outcome = Score | Failure


class Scorer:
    """The loaded function and how to call it."""

    def __init__(self, path: str, kwargs: dict[str, Any]) -> None:
        self.function: Callable = load_function(path)
        self.signature = signature_of(self.function, path)
        self.kwargs = kwargs
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(type(self.function).__call__)
        self.runner = asyncio.Runner() if self.is_async else None  # one event loop, so that clients stay open between calls

    def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item; exactly one item unless the function is batched."""
        try:
            value = self._call(self.signature.arguments(items, self.kwargs))
        except BaseException as error:  # whatever the user's code raises, SystemExit included, is the report
            return [Failure("raised " + _traceback(error), whole=self.signature.batched)] * len(items)
        try:
            rows = parse_batched(value, items) if self.signature.batched else [parse_single(value, items[0])]
        except BadShape as error:
            return [Failure(str(error), contract=True, whole=self.signature.batched)] * len(items)
        except BadValue as error:
            return [Failure(str(error))]
        return [Failure(str(row)) if isinstance(row, BadValue) else row for row in rows]

    def _call(self, arguments: dict[str, Any]) -> Any:
        if self.runner is not None:
            return self.runner.run(self.function(**arguments))
        return self.function(**arguments)


def _traceback(error: BaseException) -> str:
    """The traceback below our own frames, ending with the exception."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()


def serve(descriptor: int) -> None:
    """Main loop. First message: (path, kwargs, time-out in seconds); then lists of Item; each item (or the whole list,
    for a batched function) is answered on its own, so that the controller knows which one hangs."""
    pipe = Connection(descriptor)
    try:
        path, kwargs, timeout = pipe.recv()
        scorer = _load(pipe, path, kwargs)
        while scorer is not None:
            items = pipe.recv()
            for group in [items] if scorer.signature.batched else [[item] for item in items]:
                faulthandler.dump_traceback_later(timeout + ORPHAN_GRACE_SECONDS, exit=True)
                outcomes = scorer.score(group)
                faulthandler.cancel_dump_traceback_later()
                pipe.send(outcomes)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the controller closed the pool or died
    os._exit(0)  # threads a reward function left behind must not keep the process


def _load(pipe: Connection, path: str, kwargs: dict[str, Any]) -> Scorer | None:
    try:
        scorer = Scorer(path, kwargs)
    except ConfigError as error:
        cause = f"\n{_traceback(error.__cause__)}" if error.__cause__ is not None else ""
        pipe.send(Ready(None, f"{error}{cause}"))
        return None
    except BaseException as error:  # the user's module raised while it was imported
        pipe.send(Ready(None, f"reward.function={path} cannot be loaded; importing it raised {_traceback(error)}"))
        return None
    pipe.send(Ready(scorer.signature))
    return scorer
