"""Host memory of loading a checkpoint, per rank: a random 1.5 B-parameter model, tensor parallel 1, 2 and 4, one rank at a time.

    python scripts/bench/load_memory.py [FOLDER]      # FOLDER (default: a temporary one) takes 3 GB of disk

Prints a table: the bytes of the rank's parameters, the most resident memory the process had beyond what it had before (in all, and the
part that is mapped file pages, which the kernel takes back when memory is short), and seconds. Exit code 1 when the peak is above the
shard + the reading buffer + the mapped pages + 64 MiB. Each rank is a process of its own, as in a run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from transformers import AutoConfig

from hybridflow.config.layout import Layout
from hybridflow.models.checkpoint import READ_BYTES, load_shards
from hybridflow.models.settings import read_hf_config
from hybridflow.models.tensor_files import MAPPED_BYTES, SINGLE, TensorStream
from hybridflow.models.weight_map import weight_map

MIB = 2**20
SLACK = 64 * MIB  # allocator, file headers
SHAPE = {  # Qwen2.5 1.5B, with 4 key-value heads instead of 2 for TP 4
    "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip


def write_model(folder: Path) -> None:
    """config.json and one bfloat16 file of random tensors."""
    config = AutoConfig.for_model("qwen2", **SHAPE)
    config.save_pretrained(folder)
    shapes = weight_map(config).logical
    stream = TensorStream(folder, shapes, torch.bfloat16, 1 << 40)
    for shape in shapes.values():
        stream.put(torch.randn(shape, dtype=torch.bfloat16))
    stream.close()


def memory() -> tuple[int, int]:
    """(all, mapped file) bytes of this process that are in memory."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024, int(fields["RssFile"].split()[0]) * 1024


class Peak(threading.Thread):
    """Samples memory() every few milliseconds until told to stop; `most` is the largest of each."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.over = memory(), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.most = tuple(map(max, self.most, memory()))


def load_rank(folder: str, tp: int, rank: int) -> None:
    """Loads one rank's shard as the engine does and prints the measurement as JSON."""
    weights = weight_map(read_hf_config(folder))
    parameters = weights.megatron(Layout(tp, tp=tp), rank)
    torch.randn(1000, dtype=torch.bfloat16).float()  # what torch loads at its first operations is no part of loading
    before, peak, start = memory(), Peak(), time.perf_counter()
    peak.start()
    tensors = {name: torch.empty(parameter.shape, dtype=torch.bfloat16) for name, parameter in parameters.items()}
    load_shards(folder, parameters, tensors, expected=weights.logical)
    seconds = time.perf_counter() - start
    peak.over.set()
    peak.join()
    shard = sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    peak_bytes, mapped = (most - first for most, first in zip(peak.most, before))
    print(json.dumps({"shard": shard, "peak": peak_bytes, "mapped": mapped, "seconds": seconds}))


def main(folder: Path) -> int:
    if not (folder / SINGLE).is_file():
        write_model(folder)
    print(f"reading buffer {READ_BYTES / MIB:.0f} MiB, mapped file pages {MAPPED_BYTES / MIB:.0f} MiB\n")
    print("| TP, rank | shard MiB | peak MiB | above the shard | of that, mapped file pages | seconds |\n|---|---|---|---|---|---|")
    worst = 0
    for tp, rank in ((1, 0), (2, 0), (2, 1), (4, 0), (4, 3)):
        command = [sys.executable, __file__, str(folder), str(tp), str(rank)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        above = row["peak"] - row["shard"]
        worst = max(worst, above)
        numbers = [row["shard"], row["peak"], above, row["mapped"]]
        print(f"| {tp}, {rank} | {' | '.join(f'{n / MIB:,.0f}' for n in numbers)} | {row['seconds']:.1f} |", flush=True)
    return int(worst > READ_BYTES + MAPPED_BYTES + SLACK)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        load_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    elif len(sys.argv) == 2:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        sys.exit(main(Path(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            sys.exit(main(Path(temporary)))
