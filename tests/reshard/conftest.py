"""Ranks that all tests of resharding share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool

PRELOAD = ("torch.distributed", "hypothesis", "hybridflow.models.weight_map", "hybridflow.reshard.hybrid", "hybridflow.reshard.execute")


@pytest.fixture(scope="package")
def four() -> Iterator[RankPool]:
    with RankPool(4, preload=PRELOAD) as pool:
        yield pool


@pytest.fixture(scope="package")
def eight() -> Iterator[RankPool]:
    with RankPool(8, preload=PRELOAD) as pool:
        yield pool
