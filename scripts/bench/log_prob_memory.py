"""Peak memory of the log-prob pass against the length of a sequence, on the CPU (Linux).

    python scripts/bench/log_prob_memory.py --lengths 1024 4096 16384 32768

One sequence, of which all tokens but the first are response tokens, through MegatronEngine.log_probs with entropy, float32. The
model is small (2 layers, hidden 256) but has the vocabulary of Qwen2.5, so that logits are what counts. Each length runs in a
process of its own; its peak is the largest resident set during the pass less that before it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

VOCABULARY, HIDDEN = 151936, 256
MIB = 1 << 20


def memory(field: str) -> int:
    """VmRSS or VmHWM (peak) of this process, bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def measure(length: int, pipe: multiprocessing.connection.Connection) -> None:
    """Sends (peak bytes, seconds) of one pass."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen2Config

    from hybridflow.config.layout import Layout
    from hybridflow.data.batch import Batch, Ragged
    from hybridflow.engine.device import Device
    from hybridflow.engine.megatron import MegatronEngine

    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/store", rank=0, world_size=1)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    engine = MegatronEngine(config, Layout(1), dtype=torch.float32, device=Device.detect("cpu"), optimizer=None)
    for parameter in engine.parameters().values():
        parameter.normal_(std=0.02)
    engine.weights_changed()

    def run(tokens: int) -> None:
        ids = torch.randint(VOCABULARY, (tokens,))
        batch = Batch({"prompt_ids": Ragged(ids[:1], torch.tensor([1])), "response_ids": Ragged(ids[1:], torch.tensor([tokens - 1]))})
        engine.log_probs(batch, temperature=1.0, token_budget=tokens, entropy=True)

    run(8)
    before, start = memory("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    run(length)
    pipe.send((memory("VmHWM") - before, time.perf_counter() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    context = multiprocessing.get_context("spawn")
    print("| tokens | peak of the pass, MiB | float32 logits would be, MiB | seconds |\n|---|---|---|---|")
    for length in parser.parse_args().lengths:
        ours, theirs = context.Pipe()
        process = context.Process(target=measure, args=(length, theirs))
        process.start()
        theirs.close()
        peak, seconds = ours.recv()
        process.join()
        print(f"| {length} | {peak / MIB:.0f} | {length * VOCABULARY * 4 / MIB:.0f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
