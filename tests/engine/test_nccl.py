"""The engine on several ranks with NCCL, against Hugging Face on the CPU in float64: `pytest -m gpu tests/engine/test_nccl.py`.

Ranks that outnumber the GPUs share them (tests/ranks.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybridflow.config.layout import Layout
from tests.engine import ranks_jobs as jobs
from tests.engine.parity import TOLERANCE, Ranks, check_near, start_ranks
from tests.engine.tiny import make_checkpoint
from tests.tiny import EXPERTS

pytestmark = pytest.mark.gpu
LAYOUTS = {
    "tp2": Layout(2, tp=2),
    "tp2_pp2": Layout(4, tp=2, pp=2),
    "dp4": Layout(4),
    "pp2_vpp2": Layout(2, pp=2, vpp=2),
    "cp2": Layout(2, cp=2),
    "ep2": Layout(2, ep=2),
    "tp2_ep2": Layout(2, tp=2, ep=2),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from start_ranks(LAYOUTS[request.param], "cuda")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(folder, family) for family in ("qwen2", "llama", "qwen3_moe", "deepseek_v3")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_is_near_the_reference(ranks: Ranks, paths: dict[str, str], dtype: torch.dtype) -> None:
    """Log-probs, entropy, metrics of two steps, first gradients; sequence parallel wherever it can be, and once without."""
    layout = ranks.layout
    for family in ("qwen3_moe", "deepseek_v3") if layout.ep > 1 else ("qwen2", "llama"):
        options = {"device": "cuda", "dtype": dtype, "rows": 12, "seed": 50, "budget": 96,
                   "sequence_parallel": layout.tp > 1 and family != "llama"}
        check_near(ranks.pool.run(jobs.train, paths[family], layout, options), paths[family], options, TOLERANCE[dtype, family in EXPERTS])


def test_offload_changes_nothing(ranks: Ranks, paths: dict[str, str]) -> None:
    """Weights and optimizer to the host and back between two steps."""
    path = paths["qwen3_moe" if ranks.layout.ep > 1 else "qwen2"]
    options = {"device": "cuda", "seed": 51, "budget": 32, "sequence_parallel": ranks.layout.tp > 1}
    plain = ranks.pool.run(jobs.train, path, ranks.layout, options)
    moved = ranks.pool.run(jobs.offloaded_between, path, ranks.layout, options)
    for expected, found in zip(plain, moved):
        assert found["freed"]
        for one, other in zip(expected["metrics"], found["metrics"]):
            assert one == pytest.approx(other, rel=1e-4)
