"""What is asked of a generation engine and what comes back, free of any engine's types; and the seed of a request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import IntEnum

from hybridflow.data.batch import FINISH_LENGTH, FINISH_STOP


class FinishReason(IntEnum):
    """The finish_reason column."""

    STOP = FINISH_STOP  # a stop token or stop string ended the response; the token is its last
    LENGTH = FINISH_LENGTH  # max_response_length was reached


@dataclass(frozen=True)
class Request:
    """One response to sample. `seed` decides it alone, whatever else the engine decodes at the time."""

    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True)
class Sampling:
    """Settings all requests of one call share. temperature 0: greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Response:
    """Token ids with the stop token, and the log-prob of each at the sampling temperature."""

    token_ids: list[int] = field(repr=False)
    log_probs: list[float] = field(repr=False)
    finish_reason: FinishReason


def request_seed(seed: int, step: int, prompt_id: int, sample_index: int) -> int:
    """63-bit seed from a hash: the same on every machine and replica, unrelated for neighbouring ids."""
    key = f"{seed}/{step}/{prompt_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
