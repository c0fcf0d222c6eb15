"""The choice of experts against the routers of Hugging Face, on random logits of every family, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from hybridflow.engine.router import choose
from hybridflow.models.settings import facts_of

TOKENS, HIDDEN = 200, 16
GROUPED = {"n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
CASES: list[tuple[str, type, dict[str, Any]]] = [
    ("mixtral", MixtralTopKRouter, {"num_local_experts": 6, "num_experts_per_tok": 2}),
    ("mixtral", MixtralTopKRouter, {"num_local_experts": 6, "num_experts_per_tok": 1}),
    ("qwen2_moe", Qwen2MoeTopKRouter, {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False}),
    ("qwen3_moe", Qwen3MoeTopKRouter, {"num_experts": 9, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    ("deepseek_v2", DeepseekV2TopkRouter, {**GROUPED, "topk_method": "group_limited_greedy"}),
    ("deepseek_v2", DeepseekV2TopkRouter, {**GROUPED, "topk_method": "greedy"}),
    ("deepseek_v3", DeepseekV3TopkRouter, {**GROUPED, "norm_topk_prob": True}),
    ("deepseek_v3", DeepseekV3TopkRouter, {**GROUPED, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
]


@pytest.mark.parametrize(("family", "router", "fields"), CASES)
def test_choice_and_weights_are_those_of_hugging_face(family: str, router: type, fields: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=4, vocab_size=64,
                                  rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **fields)  # fmt: skip
    theirs = router(config)
    for tensor in theirs.state_dict().values():
        tensor.normal_()
    hidden = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        logits, weights, chosen = theirs(hidden)
    weight_TK, chosen_TK = choose(logits, facts_of(config).experts.routing, getattr(theirs, "e_score_correction_bias", None))
    ours, expected = (torch.zeros(TOKENS, logits.shape[1]).scatter(1, c, w.float()) for w, c in ((weight_TK, chosen_TK), (weights, chosen)))
    assert (chosen_TK.sort(-1).values == chosen.sort(-1).values).all()
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


def test_gradient_reaches_the_scores_of_the_chosen_alone() -> None:
    routing = facts_of(AutoConfig.for_model("deepseek_v3", num_attention_heads=4, num_key_value_heads=4, **GROUPED,
                                            rope_parameters={"rope_type": "default", "rope_theta": 1e4})).experts.routing  # fmt: skip
    logits = torch.randn(TOKENS, 12, requires_grad=True)
    weight_TK, chosen_TK = choose(logits, routing, torch.randn(12))
    (weight_TK * torch.randn_like(weight_TK)).sum().backward()
    touched = torch.zeros(TOKENS, 12, dtype=torch.bool).scatter(1, chosen_TK, True)
    assert not logits.grad[~touched].any() and logits.grad[touched].all()
