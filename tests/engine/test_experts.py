"""Mixture-of-experts models on real ranks, for each way to deal and cut experts, against Hugging Face in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybridflow.config.layout import Layout
from tests.engine.parity import Ranks, compare, start_ranks
from tests.engine.tiny import make_checkpoint
from tests.tiny import EXPERTS

LAYOUTS = {"tp2_ep2_dp2": Layout(4, tp=2, ep=2)}
BY_HAND = {  # marked slow
    "pp2_vpp2_tp2_ep2": Layout(4, pp=2, vpp=2, tp=2, ep=2),
    "ep2": Layout(2, ep=2),
    "tp2_etp2": Layout(2, tp=2, etp=2),
    "pp2_ep2": Layout(4, pp=2, ep=2),
    "cp2_ep2": Layout(4, cp=2, ep=2),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(folder, family) for family in EXPERTS}


@pytest.fixture(scope="module", params=[*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in BY_HAND)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield from start_ranks((LAYOUTS | BY_HAND)[request.param])


@pytest.mark.parametrize("family", EXPERTS)
def test_update_equals_the_reference(ranks: Ranks, paths: dict[str, str], family: str) -> None:
    """Log-probs, loss and norms, every gradient, and the weights after two steps; ranks have unequal work for their experts."""
    compare(ranks.pool, ranks.layout, paths[family], {"budget": 48, "sequence_parallel": ranks.layout.tp > 1, "seed": 31})
