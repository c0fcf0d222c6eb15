"""The executor with NCCL: `pytest -m gpu tests/reshard/test_nccl.py`. Ranks that outnumber the GPUs share them (tests/ranks.py)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from hybridflow.config.layout import Layout
from tests.ranks import RankPool
from tests.reshard.conftest import PRELOAD
from tests.reshard.test_execute import check_separate_pools, move_model, tiny_weights
from tests.reshard.test_faults import end_of_a_sync

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4, preload=PRELOAD, kind="cuda") as pool:
        yield pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [Layout(4, tp=4), Layout(4, tp=2, pp=2), Layout(4, pp=2), Layout(4, pp=2, vpp=2)],
                         ids=["tp4", "tp2pp2", "pp2dp2", "pp2vpp2dp2"])
def test_models_are_bit_exact(four: RankPool, layout: Layout, dtype: torch.dtype) -> None:
    weights = tiny_weights("qwen2", False)
    for tp_g, bucket_bytes in ((1, 4 << 10), (2, 64 << 10), (4, 256 << 20)):
        for report in four.run(move_model, weights, layout, tp_g, bucket_bytes, dtype):
            assert report.buffer_bytes <= bucket_bytes


def test_separate_pools(four: RankPool) -> None:
    check_separate_pools(four, tiny_weights("qwen2", False))


@pytest.mark.parametrize(("stalls", "text"), [
    (False, r"exchanged with ranks \[1\].* a rank has died|ranks \[1\]; one of them has not taken part"),
    (True, r"ranks \[1\]; one of them has not taken part"),
])
def test_a_bad_rank_ends_the_sync(stalls: bool, text: str) -> None:
    """NCCL tells of a dead peer where it talks through sockets; over NVLink it waits, and the deadline ends that."""
    name, message, seconds = end_of_a_sync(stalls, "cuda")
    assert name in ("ReshardError", "PhaseTimeoutError") and seconds < 6, (name, message, seconds)
    assert re.search(text, message), message
