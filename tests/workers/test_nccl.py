"""Trainer, resharding and vLLM on four GPU ranks with NCCL: `pytest -m gpu tests/workers/test_nccl.py`.

Ranks that outnumber the GPUs share them (tests/ranks.py). A pool has one generation layout: engines of one process sleep together.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import RankPool
from tests.tiny import make_tiny_model
from tests.workers import on_ranks
from tests.workers.test_layouts import LAYOUT, PRELOAD, check_damage_is_named, gap_to_hugging_face, prompts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tp_g", [2, 4])
def test_output_equals_hugging_face_across_an_update_and_a_damaged_weight_is_named(tmp_path: Path, tp_g: int) -> None:
    folder = make_tiny_model(tmp_path / "first", "qwen2", hidden=256, tied=False)
    with RankPool(LAYOUT.world, preload=PRELOAD, kind="cuda") as pool:
        pool.run(on_ranks.start, "qwen2", folder, LAYOUT, "bfloat16")
        pool.run(on_ranks.attach, "qwen2", tp_g)
        for version in (0, 1):
            for batch, gap, wrong, received in pool.run(on_ranks.generate, "qwen2", tp_g, version, prompts()):
                assert gap_to_hugging_face(folder, batch, torch.bfloat16) <= 0.25 and gap <= 0.1 and wrong == [] and received > 0
            if version == 0:
                folder = str(tmp_path / "second")
                assert pool.run(on_ranks.update, "qwen2", folder)[0] > 0
        check_damage_is_named(pool, "qwen2", tp_g)
