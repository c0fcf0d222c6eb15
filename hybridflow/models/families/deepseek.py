"""DeepSeek-V2 and V3: latent attention; after the first layers a choice of experts, by group, beside shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridflow.config.model_facts import ModelFacts
from hybridflow.errors import ModelError
from hybridflow.models.cuts import Entry, HeadRows, Row, Stacked
from hybridflow.models.families.dense import Family, pre_norms, replicated
from hybridflow.models.families.moe import ExpertNames, feed_forward
from hybridflow.models.rope import latent_scales, rotary
from hybridflow.models.settings import MegatronSettings, dense_settings, facts_of

# Field -> the only values for which Hugging Face and vLLM compute the same, and why the others are refused.
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_bias": ((False, None), "vLLM gives latent attention no biases"),
    "rms_norm_eps": ((1e-6,), "the norms inside latent attention have 1e-6 in Hugging Face and rms_norm_eps in vLLM"),
    "rope_interleave": ((True, None), "vLLM rotates neighbouring pairs"),
    "mlp_bias": ((False, None), "vLLM gives the feed-forward no biases"),
    "moe_layer_freq": ((1, None), "Hugging Face has experts in every layer after the first ones"),
}
V2_ONLY = {
    "norm_topk_prob": ((False, None), "Hugging Face ignores it and vLLM does not"),
    "topk_method": (("greedy", "group_limited_greedy"), "no other way to choose experts is known"),
    "scoring_func": (("softmax", None), "Hugging Face scores with a softmax"),
}
V3_ONLY = {
    "topk_method": (("noaux_tc",), "vLLM chooses experts by it; the released models have it"),
    "scoring_func": (("sigmoid",), "vLLM scores experts by it; the released models have it"),
}


def settings(hf_config: Any) -> MegatronSettings:
    """Raises ModelError for every field whose value the engines read differently."""
    version = V3_ONLY if hf_config.model_type == "deepseek_v3" else V2_ONLY
    problems = []
    for name, (allowed, reason) in {**ONLY, **version}.items():
        value = getattr(hf_config, name, None)
        if value not in allowed:
            problems.append(f"{name} {value!r} is not supported for {hf_config.model_type} ({reason}); supported: {allowed[0]!r}")
    groups = getattr(hf_config, "n_group", None) or 1
    if getattr(hf_config, "topk_method", None) == "greedy" and groups > 1:
        problems.append(f"topk_method 'greedy' with n_group {groups} is not supported: vLLM chooses by group and Hugging Face does not; "
                        "set n_group and topk_group to 1")
    if problems:
        raise ModelError("\n".join(problems))
    latent = facts_of(hf_config).latent
    base, rope = dense_settings(hf_config), rotary(hf_config, latent.rope)
    rotary_scale, softmax_scale = latent_scales(hf_config, latent.head_dim, rope)
    return replace(
        base, transformer=base.transformer | {"softmax_scale": softmax_scale}, inverse_frequencies=rope.inverse_frequencies,
        latent=latent, rotary_scale=rotary_scale,
    )  # fmt: skip


def attention(n: int, shape: ModelFacts) -> list[Entry]:
    """Latent attention of layer n. Both projections down are one parameter, as in vLLM, where queries are compressed too."""
    hf, megatron, sizes = f"model.layers.{n}.self_attn", f"decoder.layers.{n}.self_attention", shape.latent
    down, ranks = [f"{hf}.kv_a_proj_with_mqa.weight"], [sizes.kv_rank + sizes.rope]
    query = ("q_proj", "linear_q_proj", shape.hidden)
    entries, name = [], "kv_a_proj_with_mqa"
    if sizes.q_rank is not None:
        down, ranks, name = [f"{hf}.q_a_proj.weight", *down], [sizes.q_rank, *ranks], "fused_qkv_a_proj"
        query = ("q_b_proj", "linear_q_up_proj", sizes.q_rank)
        norm = f"{hf}.q_a_layernorm.weight"
        entries.append(replicated(norm, f"{megatron}.q_layernorm.weight", norm, sizes.q_rank))
    norm = f"{hf}.kv_a_layernorm.weight"
    cut = Stacked(tuple(ranks), (shape.hidden,))
    entries += [
        Entry(tuple(down), cut, f"{megatron}.linear_down_proj.weight", f"{hf}.{name}.weight"),
        replicated(norm, f"{megatron}.kv_layernorm.weight", norm, sizes.kv_rank),
    ]
    ups = (query, ("kv_b_proj", "linear_kv_up_proj", sizes.kv_rank))
    for (up, target, inputs), size in zip(ups, (sizes.head_dim, sizes.nope + sizes.value)):
        cut = HeadRows(shape.heads, size, (inputs,))
        entries.append(Entry((f"{hf}.{up}.weight",), cut, f"{megatron}.{target}.weight", f"{hf}.{up}.weight"))
    out = Row(shape.hidden, shape.heads * sizes.value, f"attention output columns ({shape.heads} heads x {sizes.value})")
    return [*entries, Entry((f"{hf}.o_proj.weight",), out, f"{megatron}.linear_proj.weight", f"{hf}.o_proj.weight")]


def layer(hf_config: Any, n: int) -> list[Entry]:
    shape = facts_of(hf_config)
    return [*pre_norms(n, shape), *attention(n, shape), *feed_forward(n, shape, ExpertNames())]


V2 = Family("deepseek_v2", settings, layer)
V3 = Family("deepseek_v3", settings, layer)
