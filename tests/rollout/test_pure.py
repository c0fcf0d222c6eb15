"""Seeds and stop ids, without an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.config.schema import RolloutConfig
from hybridflow.errors import ModelError
from hybridflow.rollout.requests import request_seed
from hybridflow.rollout.stops import eos_token_ids, stop_token_ids


def test_request_seeds_are_stable_and_distinct() -> None:
    """The number is fixed for all time: a resumed run must sample what the first would have."""
    assert request_seed(1, 2, 3, 4) == 1159737786199761749
    seeds = {request_seed(a, b, c, d) for a in range(6) for b in range(6) for c in range(6) for d in range(6)}
    assert len(seeds) == 6**4
    assert all(0 <= seed < 2**63 for seed in seeds)


def _folder(path: Path, config: dict, generation: dict | None = None) -> str:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return str(path)


@pytest.mark.parametrize(("config", "generation", "wanted"), [
    ({"eos_token_id": 2}, None, [2]),
    ({"eos_token_id": 2}, {"eos_token_id": [3, 4]}, [3, 4]),
    ({"eos_token_id": [2, 5]}, {"temperature": 0.7}, [2, 5]),
    ({"eos_token_id": 2}, {"eos_token_id": 0}, [0]),
    ({}, None, []),
])
def test_eos_comes_from_the_model_folder(tmp_path: Path, config: dict, generation: dict | None, wanted: list[int]) -> None:
    assert eos_token_ids(_folder(tmp_path, config, generation)) == wanted


def test_stop_ids_join_eos_unless_it_is_ignored(tmp_path: Path) -> None:
    path = _folder(tmp_path, {"eos_token_id": 2})
    assert stop_token_ids(path, RolloutConfig(stop_token_ids=[9, 2])) == (2, 9)
    assert stop_token_ids(path, RolloutConfig(stop_token_ids=[9], ignore_eos=True)) == (9,)


def test_unreadable_folders_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        eos_token_ids(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        eos_token_ids(str(tmp_path))
