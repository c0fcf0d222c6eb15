"""Arguments and results of a verb, between the form that travels and the form a role sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridflow.cluster.sharded import RowRequest, ShardResult, assemble, store
from hybridflow.data.batch import Batch


@dataclass(frozen=True)
class BatchAndMore:
    """Result of a verb that returns (Batch, something)."""

    shard: ShardResult
    more: Any


def unpack(value: Any) -> Any:
    """Worker side: RowRequests become Batches."""
    if isinstance(value, RowRequest):
        return assemble(value)
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        return {key: unpack(item) for key, item in value.items()}
    return value


def pack(result: Any) -> Any:
    """Worker side: a Batch, alone or first of a pair, stays in the object store; anything else travels by value."""
    if isinstance(result, Batch):
        return store(result)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Batch):
        return BatchAndMore(store(result[0]), result[1])
    return result
