"""Expert models end to end: expert-parallel shards of a checkpoint -> resharding -> vLLM, against Hugging Face in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.config.layout import Layout
from hybridflow.config.schema import RolloutConfig
from hybridflow.models.weight_map import weight_map
from tests.ranks import RankPool
from tests.rollout import on_ranks
from tests.rollout.test_engine import OPTIONS, RESPONSE, check_against_hf, random_prompts
from tests.tiny import make_tiny_model

EP2 = Layout(2, ep=2)
# vLLM's CPU kernel of latent attention knows one size only: 512 + 64.
LATENT_SIZES = {"heads": 2, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
# family -> training layout, rollout.tp, changes of the tiny model
CASES: dict[str, tuple[Layout, int, dict[str, Any]]] = {
    "mixtral": (EP2, 2, {}),
    "qwen2_moe": (Layout(2, tp=2, etp=2), 1, {}),
    "qwen3_moe": (Layout(2, pp=2), 2, {}),
    "deepseek_v2": (Layout(2, tp=2), 2, {**LATENT_SIZES, "heads": 4}),  # plain rotary embedding, queries not compressed
    "deepseek_v3": (Layout(2, pp=2), 1, LATENT_SIZES),  # YaRN
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def checkpoint(path: Path, family: str, seed: int, changes: dict[str, Any]) -> str:
    """Matrices half as large as usual: logits stay of order one, so that float32 log-probs agree to 1e-5."""
    make_tiny_model(path, family, hidden=128, layers=2, seed=seed, tied=False, **changes)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    model.save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_output_equals_hugging_face_after_every_sync(pool: RankPool, family: str, tmp_path: Path) -> None:
    """Twice, with other weights: what vLLM packs or derives from the first must not outlive them."""
    layout, tp_g, changes = CASES[family]
    paths = [checkpoint(tmp_path / str(seed), family, seed, changes) for seed in (0, 1)]
    config = RolloutConfig(kv_cache_gib=0.03, max_response_length=RESPONSE, max_num_seqs=16, tp=tp_g)
    pool.run(on_ranks.start, family, paths[0], weight_map(AutoConfig.from_pretrained(paths[0])), layout, tp_g, config)
    prompts = random_prompts([3, 17, 60])
    for version, path in enumerate(paths):
        pool.run(on_ranks.sync, family, path, version)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for batch in pool.run(on_ranks.generate, family, prompts, False, {**OPTIONS, "temperature": 0.0, "version": version}):
            check_against_hf(model, batch, 0.0)
