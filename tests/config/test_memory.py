"""Predicted memory: parameters per rank are those of the weight map; phases hold what they should."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hybridflow.config.layout import Layout
from hybridflow.config.memory import GIB, generation_parameters, phases, render, shared_parameters, training_parameters
from hybridflow.config.model_facts import ModelFacts
from tests.config.support import SMOLLM2, config_of


def weights_of(facts: ModelFacts, head: str = "lm") -> Any:
    from transformers import AutoConfig

    from hybridflow.models.weight_map import weight_map

    return weight_map(AutoConfig.for_model(
        facts.family, num_hidden_layers=facts.layers, hidden_size=facts.hidden, intermediate_size=facts.ffn,
        num_attention_heads=facts.heads, num_key_value_heads=facts.kv_heads, vocab_size=facts.vocab, tie_word_embeddings=facts.tied,
        head_dim=facts.head_dim, attention_bias=facts.output_bias, mlp_bias=facts.mlp_bias,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"}), head)


@pytest.mark.parametrize(("family", "flags"), [
    ("llama", {}), ("llama", {"qkv_bias": True, "output_bias": True}), ("llama", {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
    ("mistral", {}), ("qwen2", {"qkv_bias": True}), ("qwen3", {"qk_norm": True}),
])  # fmt: skip
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_per_rank_are_those_of_the_weight_map(family: str, flags: dict[str, bool], tied: bool) -> None:
    facts = ModelFacts("m", family, layers=4, hidden=32, ffn=64, heads=8, kv_heads=4, head_dim=4, vocab=101, max_positions=64, tied=tied,
                       **flags)
    table, scalar = weights_of(facts), weights_of(facts, "scalar")

    def size(parameters: dict[str, Any]) -> int:
        return sum(math.prod(parameter.shape) for parameter in parameters.values())

    for tp, pp in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 4)]:
        layout = Layout(tp * pp, tp=tp, pp=pp)
        ranks = range(layout.world)
        assert training_parameters(facts, tp, pp) == max(size(table.megatron(layout, rank)) for rank in ranks), (tp, pp)
        assert training_parameters(facts, tp, pp, scalar=True) == max(size(scalar.megatron(layout, rank)) for rank in ranks), (tp, pp)
    for tp in (1, 2, 4, 8):
        assert generation_parameters(facts, tp) == size(table.vllm(tp, 0)), tp


@pytest.mark.parametrize(("tied", "tp", "pp"), [(True, 1, 1), (False, 2, 1), (True, 2, 2), (False, 4, 2)])
def test_shared_parameters_are_those_of_the_weight_map(tied: bool, tp: int, pp: int) -> None:
    from hybridflow.reshard.sharing import shared_parameters as shared_names

    facts = ModelFacts("m", "qwen2", layers=4, hidden=32, ffn=64, heads=8, kv_heads=4, head_dim=4, vocab=101, max_positions=64, tied=tied,
                       qkv_bias=True)
    table = weights_of(facts)
    target = table.vllm(tp, 0)
    pairs = shared_names(table.megatron(Layout(tp * pp, tp=tp, pp=pp), 0), target)
    assert shared_parameters(facts, tp, pp, tp) == sum(math.prod(target[name].shape) for name in pairs)
    assert shared_parameters(facts, tp, pp, 2 * tp) == 0


def test_phases_hold_what_the_settings_say() -> None:
    config = config_of(rollout__kv_cache_gib=2.0, algorithm__kl_coef=0.1, data__train_batch_size=60)
    update, generate = phases(config, 2, SMOLLM2)
    count = SMOLLM2.parameters
    assert update.parts["weights"] == update.parts["reference weights"] == 2 * count
    assert update.parts["gradients"] == 4 * count and update.parts["optimizer"] == 12 * count // 2
    assert generate.parts["key-value cache"] == 2 * GIB and 0 < generate.parts["rollout weights"] < 2 * count // 4
    config.rollout.alias_weights = "off"
    assert phases(config, 2, SMOLLM2)[1].parts["rollout weights"] == 2 * count
    assert generate.parts["optimizer"] == update.parts["optimizer"]
    config.actor.offload, config.algorithm.kl_coef = True, 0.0
    update, generate = phases(config, 2, SMOLLM2)
    assert "optimizer" not in generate.parts and "gradients" not in generate.parts and "reference weights" not in update.parts
    config.actor.model.dtype = "float32"
    assert phases(config, 1, SMOLLM2)[0].parts["optimizer"] == 8 * count  # no master copy
    config.algorithm.name = "sft"
    assert [phase.name for phase in phases(config, 1, SMOLLM2)] == ["update"]
    assert "GiB per rank" in render(phases(config, 1, replace(SMOLLM2, layers=2)))


def test_recompute_saves_activations() -> None:
    none, full = (phases(config_of(actor__recompute=mode), 1, SMOLLM2)[0].parts["activations (estimate)"] for mode in ("none", "full"))
    assert 0 < full < none / 4


def test_an_offloaded_reward_model_takes_no_memory_while_others_work() -> None:
    model = {"model": {"path": "/model"}}
    kept, parked = (phases(config_of(reward_models={"helpful": model | {"offload": offload}}), 1, SMOLLM2) for offload in (False, True))
    for before, after in zip(kept, parked):
        assert before.total - after.total == before.parts["reward_model_helpful weights"] > 0
        assert "reward_model_helpful weights" not in after.parts
