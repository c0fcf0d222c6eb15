"""Reward functions for the tests: sound ones, and one for every way to go wrong."""

from __future__ import annotations

import asyncio
import ctypes
import enum
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any


def length(prompt: str, response: str) -> float:
    return float(len(response))


def with_columns(prompt: str, response: str, answer: int, scale: float = 1.0, **columns: object) -> dict[str, float]:
    return {"score": scale * answer, "columns": float(len(columns)), "sometimes": None if answer == 2 else 1.0}


def with_reason(prompt: str, response: str, finish_reason: str, response_length: int) -> float:
    return response_length if finish_reason == "length" else -1.0


async def asynchronous(prompt: str, response: str) -> float:
    await asyncio.sleep(0.01)
    return float(len(response))


async def sleeps_async(prompt: str, response: str) -> float:
    """`nap`: yields for 0.3 s. `late`: for ever. `deaf`: for ever, and refuses to be cancelled. `block`: never yields."""
    if response == "nap":
        await asyncio.sleep(0.3)
    while response in ("late", "deaf"):
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            if response == "late":
                raise
    if response == "block":
        time.sleep(1e9)
    if response == "exit":
        os._exit(3)
    if response == "own timeout":
        raise TimeoutError("the service is slow")
    return 1.0


def abstains(prompt: str, response: str, answer: int | None) -> dict[str, object] | None:
    """No opinion where the row has no answer; a number and a text beside the score."""
    if answer is None:
        return None
    return {"score": float(answer), "half": answer / 2, "seen": f"<{response}>"}


def abstaining_tokens(prompt: str, response: str, response_length: int) -> list[float] | None:
    return None if response == "none" else [0.5] * response_length


def batched(prompts: list[str], responses: list[str], answer: list[int]) -> list[float]:
    return [len(response) + a for response, a in zip(responses, answer, strict=True)]


async def batched_async(prompts: list[str], responses: list[str]) -> list[int]:
    return [len(r) for r in responses]


def tokens(prompt: str, response: str, response_length: int) -> list[float]:
    return [0.5] * response_length


def batched_tokens(prompts: list[str], responses: list[str], response_lengths: list[int]) -> list[list[float]]:
    return [[1.0] * n for n in response_lengths]


def uses_alarm(prompt: str, response: str) -> float:
    """What math-verify does: only possible in the main thread of a process."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    return 1.0 if threading.current_thread() is threading.main_thread() else 0.0


def hangs(prompt: str, response: str) -> float:
    while response == "hang":
        pass
    return 1.0


def hangs_holding_the_gil(prompt: str, response: str) -> float:
    if response == "hang":
        re.match(r"(a+)+$", "a" * 64 + "b")
    return 1.0


def sleeps(prompt: str, response: str) -> float:
    if response == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(77.125)"])
        time.sleep(1e9)
    return 1.0


def batched_hangs(prompts: list[str], responses: list[str]) -> list[float]:
    time.sleep(1e9)
    return []


def raises(prompt: str, response: str) -> float:
    if response == "raise":
        raise ZeroDivisionError("told to")
    return 1.0


def batched_raises(prompts: list[str], responses: list[str]) -> list[float]:
    raise ZeroDivisionError("told to")


def exits(prompt: str, response: str) -> float:
    if response == "exit":
        os._exit(3)
    if response == "system exit":
        sys.exit(4)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "close":  # as a library does that makes a daemon of its process
        os.closerange(3, 256)
        time.sleep(60)
    if response == "leave a child":  # which keeps the pipe open after the process is gone
        if os.fork() == 0:
            time.sleep(60)
        os._exit(5)
    return 1.0


def prints(prompt: str, response: str) -> float:
    sys.stdout.write("x" * 100_000)
    return 1.0


class ArrayLike:
    """What numpy arrays, numpy scalars and torch tensors have in common; importing those here would slow every process."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tolist(self) -> Any:
        return self.value


class Kind(enum.StrEnum):
    GOOD = "good"


SPECIAL = {
    "none": None, "nan": float("nan"), "inf": float("inf"), "str": "0.5", "list": [1.0], "empty": [], "array": ArrayLike([[1.0]]),
    "no score": {"value": 1.0}, "list extra": {"score": 1.0, "extra": [1.0]}, "reserved": {"score": 1.0, "timeouts": 1.0},
    "huge": 1e39, "huge tokens": [3e38] * 2, "inf extra": {"score": 1.0, "extra": float("inf")},
    "huge extra": {"score": 1.0, "extra": 10**400},
    "scalar": ArrayLike(0.5), "bool": True, "int": 2, "enum": {"score": 1.0, "kind": Kind.GOOD},
    "object": object(),
}


def returns(prompt: str, response: str) -> object:
    return SPECIAL[response]


def batched_returns(prompts: list[str], responses: list[str], kind: list[str]) -> object:
    n = len(responses)
    return {
        "column": [[1.0]] * n, "array column": ArrayLike([[1.0]] * n), "padded": ArrayLike([[1.0] * 7] * n), "short": [1.0] * (n - 1),
        "number": 1.0, "none": None, "dict": {"score": [1.0] * n}, "nan row": [1.0] * (n - 1) + [float("nan")], "deep": [[[1.0]]] * n,
        "dicts": [{"score": 1.0, "good": float(i)} for i in range(n)],
    }[kind[0]]


def library_values(prompt: str, response: str) -> object:
    import numpy as np
    import torch

    return {"numpy": np.float32(0.5), "bool": np.bool_(True), "torch": torch.tensor(0.5), "array": np.ones((1, 1))}[response]


def no_response(prompt: str, answer: int) -> float:
    return 0.0


def mixed(prompt: str, responses: list[str]) -> float:
    return 0.0


def both(prompt: str, response: str, prompts: list[str], responses: list[str]) -> float:
    return 0.0


class Scorer:
    def __call__(self, prompt: str, response: str) -> float:
        return 7.0


callable_object = Scorer()
NOT_CALLABLE = 3
