"""Local layers and Transformer Engine's on one GPU: the same random model and packed batch, both held against float32.

    python scripts/bench/layers.py                     # a dense 1.5 B model and a mixture of 64 experts
    python scripts/bench/layers.py --models dense --tokens 32768 --rows 8

Prints errors of log-probs, loss and gradient norm against the same weights in float32 (local layers), seconds of a step, and memory.
Exit code 1 when an error of Transformer Engine is above twice that of local bfloat16 layers (largest: four times; loss and norm: and
above 1 % and 3 %).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from hybridflow.config.layout import Layout
from hybridflow.config.schema import OptimizerConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.engine.device import Device
from hybridflow.engine.loss_types import LossOutput, TokenBatch
from hybridflow.engine.megatron import MegatronEngine

ROPE = {"rope_type": "default", "rope_theta": 1e6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Qwen2.5-1.5B
    "dense": ("qwen2", {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
                        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}),
    # Qwen3-30B-A3B with 4 of its 48 layers and half of its experts
    "moe": ("qwen3_moe", {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 4,
                          "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 64,
                          "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936}),
}
RUNS = (("float32", "local"), ("bfloat16", "local"), ("bfloat16", "transformer_engine"))


@dataclass
class Found:
    """What one engine computed, and what it took. seconds: of a step; gib: peak memory."""

    log_prob: torch.Tensor
    loss: float
    grad_norm: float
    seconds: float
    gib: float


def likelihood(tokens: TokenBatch) -> LossOutput:
    return LossOutput(-(tokens.columns["loss_weight"] * tokens.log_prob_T).sum())


def packed_batch(rows: int, tokens: int, vocabulary: int) -> Batch:
    """`rows` rows of very different lengths, `tokens` together, a quarter of each the prompt."""
    generator = torch.Generator().manual_seed(1)
    share = torch.rand(rows, generator=generator) + 0.1
    lengths = (share / share.sum() * tokens).long().clamp(min=8)
    prompt = lengths // 4
    response = lengths - prompt
    ids = torch.randint(vocabulary, (int(lengths.sum()),), generator=generator)
    cut = int(prompt.sum())
    return Batch({"prompt_ids": Ragged(ids[:cut], prompt), "response_ids": Ragged(ids[cut:], response),
                  "loss_weight": torch.full((rows,), 1.0 / int(response.sum()), dtype=torch.float64)})


def fill(engine: MegatronEngine) -> int:
    """The same weights for every engine, rounded to bfloat16; their number."""
    count = 0
    for number, (name, tensor) in enumerate(sorted(engine.parameters().items())):
        generator = torch.Generator(tensor.device).manual_seed(number)
        values = torch.randn(tensor.shape, generator=generator, device=tensor.device)
        tensor.copy_(((1 + 0.1 * values) if "norm" in name else 0.03 * values).bfloat16())
        count += tensor.numel()
    engine.weights_changed()
    return count


def measure(model: str, dtype: str, layers: str, batch: Batch, steps: int) -> Found:
    device = Device.detect("cuda")
    gc.collect()
    torch.cuda.empty_cache()
    device.reset_peak()
    family, shape = MODELS[model]
    config = AutoConfig.for_model(family, max_position_embeddings=65536, rope_parameters=ROPE, **shape)
    engine = MegatronEngine(config, Layout(1), dtype=getattr(torch, dtype), device=device, optimizer=OptimizerConfig(lr=1e-6),
                            transformer_impl=layers, recompute="full" if dtype == "float32" else "none")
    parameters = fill(engine)
    tokens = int((batch["prompt_ids"].lengths + batch["response_ids"].lengths).sum())
    call = {"temperature": 1.0, "token_budget": tokens}
    log_prob = engine.log_probs(batch, entropy=False, **call)["log_prob"].values
    first, seconds = engine.update(batch, likelihood, **call), []
    for _ in range(steps):
        device.synchronize()
        start = time.perf_counter()
        engine.update(batch, likelihood, **call)
        device.synchronize()
        seconds.append(time.perf_counter() - start)
    found = Found(log_prob, first["loss"], first["grad_norm"], statistics.median(seconds), device.memory()["peak"] / 2**30)
    rate = f", {6 * parameters * tokens / found.seconds / 1e12:.0f} TFLOP/s" if model == "dense" else ""
    print(f"{model} {dtype} {layers}: loss {found.loss:.6f}, gradient norm {found.grad_norm:.5f}, {found.seconds:.4f} s a step of {tokens} "
          f"tokens{rate}, peak {found.gib:.1f} GiB, {parameters / 1e9:.2f} B parameters", flush=True)
    return found


def errors(found: Found, exact: Found) -> dict[str, float]:
    gap = (found.log_prob - exact.log_prob).abs()
    return {"log-prob mean": gap.mean().item(), "log-prob largest": gap.max().item(),
            "loss": abs(found.loss / exact.loss - 1), "gradient norm": abs(found.grad_norm / exact.grad_norm - 1)}


FLOOR = {"log-prob mean": 0.0, "log-prob largest": 0.0, "loss": 0.01, "gradient norm": 0.03}  # a single number can be right by chance
FACTOR = {"log-prob largest": 4.0}  # one token of thousands; the others: 2


def compare(model: str, rows: int, tokens: int, steps: int) -> bool:
    batch = packed_batch(rows, tokens, MODELS[model][1]["vocab_size"])
    exact, local, fused = (measure(model, dtype, layers, batch, steps if dtype == "bfloat16" else 1) for dtype, layers in RUNS)
    ours, theirs = errors(local, exact), errors(fused, exact)
    print(f"\n| {model}: error against float32 | local | Transformer Engine |\n|---|---|---|")
    for name in ours:
        print(f"| {name} | {ours[name]:.2e} | {theirs[name]:.2e} |")
    between = (local.log_prob - fused.log_prob).abs()
    print(f"between the two: log-prob mean {between.mean():.2e}, largest {between.max():.2e}; "
          f"a step takes {local.seconds / fused.seconds:.2f}x as long with local layers\n", flush=True)
    return all(theirs[name] <= max(FLOOR[name], FACTOR.get(name, 2.0) * ours[name]) for name in ours)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs an NVIDIA GPU; torch.cuda.is_available() is False")
    torch.backends.cuda.matmul.allow_tf32 = False
    Device.detect("cuda").activate()
    dist.init_process_group("nccl", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    agree = [compare(model, options.rows, options.tokens, options.steps) for model in options.models]
    dist.destroy_process_group()
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
