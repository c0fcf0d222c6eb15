"""Seconds, bytes and memory of every phase between training and generating, on one rank with shared and with copied weights.

    python scripts/bench/hybrid_phases.py --shape 1.5b --rounds 5                  # one GPU
    python scripts/bench/hybrid_phases.py --shape tiny --device cpu --rounds 3     # tries the program

Each way runs in a process of its own (an engine lives as long as its process). The model has random weights, written to a temporary
folder first. Copy bandwidth counts bytes read and written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.timing import free_port

SHAPES = {  # hidden, feed-forward, layers, heads, key-value heads, vocabulary, tied: Qwen2.5 1.5B and 7B
    "tiny": (128, 256, 2, 4, 2, 512, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False),
}


def write_model(shape: str, folder: str) -> str:
    """A Hugging Face folder with random bfloat16 weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden, ffn, layers, heads, kv_heads, vocab, tied = SHAPES[shape]
    config = AutoConfig.for_model("qwen2", hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
                                  num_key_value_heads=kv_heads, vocab_size=vocab, tie_word_embeddings=tied, max_position_embeddings=4096,
                                  rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def measure(arguments: argparse.Namespace, folder: str, alias: str) -> None:
    """Rounds of sync, generation and update on this process's only rank; a table of each round."""
    import torch
    import torch.distributed as dist

    from hybridflow.algorithms.losses import policy_loss
    from hybridflow.cluster.context import WorkerContext
    from hybridflow.config.layout import Layout
    from hybridflow.config.schema import Config
    from hybridflow.data.batch import Batch, Ragged
    from hybridflow.engine.device import Device
    from hybridflow.reshard.grouping import generation_layout
    from hybridflow.workers.hybrid import ActorRolloutWorker

    device = Device.detect(arguments.device)
    device.activate()
    dist.init_process_group(device.backend)
    config = Config()
    config.actor.model.path, config.actor.offload = folder, True
    config.data.max_prompt_length = config.rollout.max_response_length = 64
    config.rollout.alias_weights, config.rollout.kv_cache_gib, config.rollout.max_num_seqs = alias, arguments.kv_cache_gib, 64
    layout = Layout(1)
    context = WorkerContext(0, 1, layout, generation_layout(layout, 1), device.kind, (0,))
    worker = ActorRolloutWorker(context, config, policy_loss(config), arguments.rounds)
    rows = Ragged.from_rows([[5 + i, 6] for i in range(16)], torch.int64)
    prompts = Batch({"prompt_id": torch.arange(16), "prompt_ids": rows, "prompt_length": rows.lengths})
    for version in range(arguments.rounds):
        report = worker.enter_generation(version=version)
        batch = worker.generate_sequences(prompts, step=version, version=version, n=1, temperature=1.0)
        worker.leave_generation()
        batch = batch.union(worker.compute_log_prob(batch)).with_columns(advantage=torch.randn(16), loss_weight=torch.full((16,), 1 / 1024))
        worker.update_actor(batch)
        speed = 2 * report["bytes_local"] / report["seconds"] / 1e9
        print(f"alias_weights={alias}, round {version}: {report['bytes_local'] / 1e9:.3f} GB copied, {report['bytes_shared'] / 1e9:.3f} GB "
              f"shared, {report['seconds']:.4f} s, {speed:.0f} GB/s, probe gap {report.get('probe_gap', float('nan')):.2g}")
        print(worker.ledger.text(), flush=True)
    os._exit(0)  # vLLM's threads would hold a normal exit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.5b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-gib", type=float, default=8.0)
    parser.add_argument("--run", nargs=2, metavar=("FOLDER", "ALIAS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        measure(arguments, *arguments.run)
    with tempfile.TemporaryDirectory() as folder:
        write_model(arguments.shape, folder)
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        for alias in ("auto", "off"):
            code = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--run", folder, alias],
                                  env=os.environ | place | {"MASTER_PORT": str(free_port())}).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
