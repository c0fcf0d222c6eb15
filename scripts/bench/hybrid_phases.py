"""Seconds, bytes and memory of every phase between training and generating, with weights shared with the trainer and with copies.

    python scripts/bench/hybrid_phases.py                                          # one GPU, about a minute
    python scripts/bench/hybrid_phases.py --model qwen2.5-7b --recompute full      # one GPU of 139 GiB, 100 GiB of host memory
    python scripts/bench/hybrid_phases.py --model tiny --device cpu                # tries the program

One rank, TP1 -> TP1, bfloat16. Each way runs in a process of its own (an engine lives as long as its process); the model has random
weights, written to a temporary folder first. A round is: sync, generate, sleep, onload, update. The first is a warm-up (no optimizer
state yet), the table has the medians of the others. Copy bandwidth counts bytes read and written. Peak memory is what the whole GPU
has in use after generating: torch gives nothing back in between.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hybridflow.cluster.launch_environment import MAX_THREADS, pinned_memory
from hybridflow.network import free_port
from scripts.bench.models import model_config

ONE_GPU = ("tiny", "qwen2.5-1.5b", "qwen2.5-7b")  # models of scripts/bench/models.py that one GPU can train
PHASES = ("offload", "wake_weights", "reshard", "wake_kv", "generate", "sleep", "onload", "update")
COPY_LIMIT = 4.3e12  # bytes a second that a copy on one H200 reads and writes
PROMPTS, RESPONSE = 16, 32  # of a round: 16 responses of 32 tokens
GB, GIB = 1e9, 1 << 30


def write_model(name: str, folder: str, device: str) -> None:
    """A Hugging Face folder with random bfloat16 weights, made on `device`."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(model_config(name), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def measure(arguments: argparse.Namespace, folder: str, alias: str) -> list[dict[str, Any]]:
    """Rounds on this process's only rank: the report of each sync, with seconds_PHASE and memory_PHASE (GiB) of the whole round."""
    import torch
    import torch.distributed as dist

    from hybridflow.cluster.context import WorkerContext
    from hybridflow.config.layout import Layout
    from hybridflow.engine.device import Device
    from hybridflow.reshard.grouping import generation_layout
    from hybridflow.workers.hybrid import ActorRolloutWorker

    device = Device.detect(arguments.device)
    device.activate()
    dist.init_process_group(device.backend)
    config, loss = _settings(arguments, folder, alias)
    layout = Layout(1)
    context = WorkerContext(0, 1, layout, generation_layout(layout, 1), device.kind, (0,))
    start = time.perf_counter()
    worker = ActorRolloutWorker(context, config, loss, arguments.rounds)
    print(f"rollout.alias_weights={alias}: worker up in {time.perf_counter() - start:.0f} s", flush=True)
    vocab = model_config(arguments.model).vocab_size
    rounds = []
    for version in range(arguments.rounds):
        report = _round(worker, version, torch.randint(5, vocab, (PROMPTS, 4)).tolist())
        rounds.append(report)
        times = ", ".join(f"{name} {report[f'seconds_{name}']:.3f}" for name in PHASES)
        print(f"round {version}: {times} s; {report['memory_generate']:.2f} GiB in use, probe gap "
              f"{report.get('probe_gap', float('nan')):.2g}", flush=True)
    return rounds


def _settings(arguments: argparse.Namespace, folder: str, alias: str) -> tuple[Any, Any]:
    """(configuration, loss) of the worker."""
    from hybridflow.algorithms.losses import policy_loss
    from hybridflow.config.schema import Config

    config = Config()
    config.actor.model.path, config.actor.offload, config.actor.recompute = folder, True, arguments.recompute
    config.data.max_prompt_length, config.rollout.max_response_length, config.rollout.ignore_eos = 32, RESPONSE, True
    config.rollout.alias_weights, config.rollout.kv_cache_gib = alias, arguments.kv_cache_gib
    config.rollout.max_num_seqs, config.rollout.enforce_eager = 64, not arguments.cuda_graphs
    return config, policy_loss(config)


def _round(worker: Any, version: int, prompts: list[list[int]]) -> dict[str, Any]:
    import torch

    from hybridflow.data.batch import Batch, Ragged

    rows = Ragged.from_rows(prompts, torch.int64)
    batch = Batch({"prompt_id": torch.arange(len(rows)), "prompt_ids": rows, "prompt_length": rows.lengths})
    report = worker.enter_generation(version=version)
    with worker.ledger.phase("generate", "reshard"):
        batch = worker.generate_sequences(batch, step=version, version=version, n=1, temperature=1.0)
    worker.leave_generation()
    with worker.ledger.phase("update", "reshard"):
        batch = batch.union(worker.compute_log_prob(batch))
        weight = torch.full((len(batch),), 1.0 / (PROMPTS * RESPONSE))
        worker.update_actor(batch.with_columns(advantage=torch.randn(len(batch)), loss_weight=weight, metric_weight=weight))
        worker.device.synchronize()
    return report | worker.ledger.metrics()


def table(arguments: argparse.Namespace, device: str, ways: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: seconds and memory of each phase, then what was copied and how fast, for every way."""
    names = {"auto": "shared", "off": "copied"}
    rounds = {alias: found[1:] for alias, found in ways.items()}

    def median(alias: str, key: str) -> float:
        return statistics.median(report[key] for report in rounds[alias])

    def reach(alias: str, key: str) -> str:
        values = [report[key] for report in rounds[alias]]
        return f"{statistics.median(values):.4f} ({min(values):.4f} - {max(values):.4f})"

    def row(label: str, cells: list[str]) -> str:
        return f"| {label} | " + " | ".join(cells) + " |"

    seconds = [f"seconds, {names[alias]}" for alias in ways]
    memory = [f"GiB in use after, {names[alias]}" for alias in ways]
    lines = [f"{arguments.model} on {device}, {time.strftime('%Y-%m-%d')}: TP1 -> TP1, medians (range) of {arguments.rounds - 1} rounds, "
             f"cache {arguments.kv_cache_gib:g} GiB, CUDA graphs {'on' if arguments.cuda_graphs else 'off'}", "",
             row("phase", seconds + memory), row("---", ["---"] * (2 * len(ways)))]
    for phase in PHASES:
        lines.append(row(phase, [reach(a, f"seconds_{phase}") for a in ways] + [f"{median(a, f'memory_{phase}'):.2f}" for a in ways]))
    lines += ["", row("of a sync", [names[alias] for alias in ways]), row("---", ["---"] * len(ways)),
              row("GB copied", [f"{median(a, 'bytes_local') / GB:.3f}" for a in ways]),
              row("GB shared, not copied", [f"{median(a, 'bytes_shared') / GB:.3f}" for a in ways]),
              row("seconds of the copy", [reach(a, "seconds") for a in ways])]
    speeds = [2 * median(a, "bytes_local") / median(a, "seconds") for a in ways]
    lines.append(row("GB/s read and written", [f"{speed / GB:.0f}" for speed in speeds]))
    lines.append(row(f"of {COPY_LIMIT / 1e12:g} TB/s", [f"{speed / COPY_LIMIT:.0%}" for speed in speeds]))
    lines.append(row("GiB in use at the peak (generating)", [f"{median(a, 'memory_generate'):.2f}" for a in ways]))
    if len(ways) == 2:
        saved = median("off", "memory_generate") - median("auto", "memory_generate")
        lines += ["", f"Sharing saves {saved:.2f} GiB at the peak; shared weights: {median('auto', 'bytes_shared') / GIB:.2f} GiB."]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=ONE_GPU, default="qwen2.5-1.5b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ways", nargs="+", choices=("auto", "off"), default=["auto", "off"], help="values of rollout.alias_weights")
    parser.add_argument("--rounds", type=int, default=4, help="the first is a warm-up")
    parser.add_argument("--kv-cache-gib", type=float, default=4.0)
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    parser.add_argument("--cuda-graphs", action="store_true", help="adds minutes of compilation to the start; phases are the same")
    parser.add_argument("--run", nargs=3, metavar=("FOLDER", "ALIAS", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: the first is a warm-up, give 2 or more")
    return arguments


def run_way(folder: str, alias: str) -> list[dict[str, Any]]:
    """`measure` in a process of its own. Raises CalledProcessError when it fails."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    defaults = {"PYTORCH_CUDA_ALLOC_CONF": pinned_memory(MAX_THREADS)}  # as a rank of a run has
    out = Path(folder) / f"rounds-{alias}.json"
    command = [sys.executable, __file__, *sys.argv[1:], "--run", folder, alias, str(out)]
    subprocess.run(command, env=defaults | os.environ | place, check=True)
    return json.loads(out.read_text())


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def main() -> int:
    arguments = parse()
    if arguments.run:
        folder, alias, out = arguments.run
        Path(out).write_text(json.dumps(measure(arguments, folder, alias)))
        sys.stdout.flush()
        os._exit(0)  # vLLM's threads would hold a normal exit
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: what it leaves on the GPU would count as memory in use.
        make = f"from scripts.bench.hybrid_phases import write_model; write_model({arguments.model!r}, {folder!r}, {arguments.device!r})"
        subprocess.run([sys.executable, "-c", make], cwd=Path(__file__).resolve().parents[2], check=True)
        try:
            ways = {alias: run_way(folder, alias) for alias in arguments.ways}
        except subprocess.CalledProcessError as error:
            return error.returncode
    print("\n" + table(arguments, device_name(arguments.device), ways))
    return 0


if __name__ == "__main__":
    sys.exit(main())
