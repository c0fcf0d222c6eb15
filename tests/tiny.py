"""Tiny checkpoints for tests: a Hugging Face folder with random weights and a character-level tokenizer, no download."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hybridflow.data.char_tokenizer import char_tokenizer

CHARACTERS = string.digits + "+-*=(). \n" + string.ascii_letters + "!\"#$%&',/:;<>?@[\\]^_`{|}~"
SPECIAL_TOKENS = 4
LATENT = {"num_key_value_heads": None, "rms_norm_eps": 1e-6, "n_routed_experts": 8, "num_experts_per_tok": 3,
          "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16,
          "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "routed_scaling_factor": 1.5}
EXPERTS: dict[str, dict[str, Any]] = {  # what tiny mixture-of-experts configurations have beside the sizes of a dense decoder
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
                  "mlp_only_layers": [1]},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 20, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8,
                                        "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True},
}


def tiny_tokenizer(vocab: int = 101, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """As many of CHARACTERS as fit `vocab` (digits and operators first), the rest unused tokens. pad 0, eos 1, bos 2."""
    return char_tokenizer(CHARACTERS[: vocab - SPECIAL_TOKENS], vocab_size=vocab, chat_template=chat_template)


def make_tiny_model(
    path: str | Path, family: str = "llama", hidden: int = 32, layers: int = 4, heads: int = 4, kv_heads: int = 2, vocab: int = 101,
    tied: bool = True, seed: int = 0, max_positions: int = 256, chat_template: str | None = None, **changes: Any,
) -> str:
    """Write config.json, model.safetensors (float32) and the tokenizer to `path`; returns the path as a string.

    Every tensor is random, biases and norm weights too, so that a mapping that swaps or loses one shows; the scale is
    large enough that greedy continuations of different prompts differ. `changes`: further fields of config.json.
    """
    tokenizer = tiny_tokenizer(vocab, chat_template)
    config = AutoConfig.for_model(
        family, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=vocab, max_position_embeddings=max_positions, tie_word_embeddings=tied,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
        **{"num_key_value_heads": kv_heads, "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
           **EXPERTS.get(family, {}), **changes},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@torch.no_grad()
def _randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1.0 + 0.2 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.2 * noise)
        elif "embed" in name:
            parameter.copy_(0.4 * noise)
        else:
            parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator))
