"""Resharding measured: ours against plain grouping and against gathering every tensor, on the same ranks in one run.

    python scripts/bench/reshard.py --tp 8 --tp-g 2                       # 8 gloo ranks on this machine
    torchrun --nproc-per-node 8 scripts/bench/reshard.py --tp 8 --tp-g 2  # GPUs with NCCL (or CPU ranks), any number of nodes
    torchrun --nproc-per-node 8 scripts/bench/reshard.py --tp 4 --tp-g 2 --pools  # half of the ranks train, the others generate
    python scripts/bench/reshard.py --simulate llama-70b --ranks 1024 --tp 8 --pp 8 --tp-g 4

Each way is checked to give the right weights, then timed: seconds are those of the slowest rank. Extra memory is what the way
takes beside the weights before and after: allocated bytes on a GPU, growth of the resident set on CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.engine.device import Device
from hybridflow.errors import ConfigError
from hybridflow.models.weight_map import WeightMap, weight_map
from hybridflow.reshard.grouping import consecutive, generation_layout
from scripts.bench.models import MODELS, model_config
from scripts.bench.reshard_simulate import simulate
from scripts.bench.reshard_ways import GatherAll, GatherEach, Planned, Pools, Way, expected, shards
from scripts.bench.timing import PeakMemory, local_ranks, positive, slowest

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Result:
    """One way: worst rank's bytes and memory, seconds of every repeat (slowest rank)."""

    name: str
    received: int
    extra: int
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(way: Way, device: Device, repeats: int) -> Result:
    """Collective. Raises AssertionError when the way gives wrong weights."""
    for tensor in way.target.values():
        tensor.zero_()
    peak = PeakMemory(device)
    way.run()
    extra = peak.growth()
    for name, wanted in expected(way).items():
        if not torch.equal(way.target[name], wanted):
            raise AssertionError(f"{way.name}: {name} is wrong on rank {way.rank}")
    seconds = [slowest(way.run, device) for _ in range(repeats)]
    worst = torch.tensor([way.received, extra], device=device.torch_device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Result(way.name, int(worst[0]), int(worst[1]), seconds)


def layouts(arguments: argparse.Namespace, ranks: int) -> tuple[Layout, GenerationLayout]:
    """Of training and, by the paper's grouping, of generation. Raises ConfigError where they do not fit the ranks."""
    if arguments.pools and ranks % 2:
        raise ConfigError(f"--pools: half of the ranks train, so their number must be even; there are {ranks}")
    layout = Layout(ranks // (2 if arguments.pools else 1), tp=arguments.tp, pp=arguments.pp)
    return layout, generation_layout(layout, arguments.tp_g)


def bench(arguments: argparse.Namespace) -> None:
    """On one rank of an initialised world; rank 0 prints the table."""
    device = Device.detect("auto" if dist.get_backend() == "nccl" else "cpu")
    layout, stride = layouts(arguments, dist.get_world_size())
    weights, dtype = weight_map(model_config(arguments.model)), DTYPES[arguments.dtype]
    plain = GenerationLayout(layout.world, arguments.tp_g, consecutive(layout.world, arguments.tp_g))
    ways = [(Pools, plain, "d  separate pools")] if arguments.pools else [
        (Planned, stride, "a  ours (paper's grouping)"), (Planned, plain, "a' our plan, plain grouping"),
        (GatherAll, plain, "b  plain: gather the model"), (GatherEach, plain, "c  gather every tensor")]
    results = []
    for kind, generation, label in ways:
        way = kind(label, *shards(weights, layout, generation, dtype, device), arguments.bucket_mib << 20)
        results.append(measure(way, device, arguments.repeats))
        del way
        dist.barrier()
    if dist.get_rank() == 0:
        print(table(arguments, weights, layout, results, dtype.itemsize), flush=True)


def table(arguments: argparse.Namespace, weights: WeightMap, layout: Layout, results: list[Result], itemsize: int) -> str:
    """Measured bytes beside the formulas of HybridFlow (arXiv 2409.19256), table 2, with M the bytes of the whole model."""
    total = itemsize * sum(torch.Size(shape).numel() for shape in weights.logical.values())
    t, p, t_g = arguments.tp, arguments.pp, arguments.tp_g
    gather = (t * p - 1) / (t * p)
    ours = max(0.0, (t * p - t_g) / (t_g * t * p))
    formulas = [float("nan")] if arguments.pools else [ours, float("nan"), gather, gather]
    lines = [f"{arguments.model}: M = {total / 1e6:.1f} MB ({arguments.dtype}), {layout.world} ranks, tp {t} pp {p} dp {layout.dp} "
             f"-> tp_g {t_g}, bucket {arguments.bucket_mib} MiB, {arguments.repeats} repeats",
             f"{'way':<28} {'received MB':>12} {'/ M':>7} {'paper':>7} {'extra MB':>9} {'GB/s':>7} {'seconds':>9}  range"]
    for result, formula in zip(results, formulas):
        lines.append(f"{result.name:<28} {result.received / 1e6:>12.1f} {result.received / total:>7.3f} {formula:>7.3f} "
                     f"{result.extra / 1e6:>9.1f} {result.received / result.median / 1e9:>7.1f} {result.median:>9.4f}  "
                     f"{min(result.seconds):.4f} - {max(result.seconds):.4f}")
    return "\n".join(lines + ([] if arguments.pools else comparison(arguments, weights, results, itemsize)))


def comparison(arguments: argparse.Namespace, weights: WeightMap, results: list[Result], itemsize: int) -> list[str]:
    """Ratios to the other ways, and the extra memory beside its bound."""
    ours, gathered = results[0], results[3]
    lines = [f"ours / (c): bytes {ours.received / gathered.received:.3f}, seconds {ours.median / gathered.median:.3f}; "
                 f"ours / (b): bytes {ours.received / results[2].received:.3f}, seconds {ours.median / results[2].median:.3f}"]
    largest = itemsize * max(torch.Size(parameter.shape).numel() for parameter in weights.vllm(arguments.tp_g, 0).values())
    bound = (arguments.bucket_mib << 20) + largest
    lines.append(f"extra memory of ours: {ours.extra / 1e6:.1f} MB; bucket + largest parameter of a generation shard: {bound / 1e6:.1f} MB")
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-111m", choices=sorted(MODELS))
    parser.add_argument("--simulate", choices=sorted(MODELS), metavar="MODEL", help=f"plan only, no ranks: {', '.join(sorted(MODELS))}")
    parser.add_argument("--ranks", type=positive, default=8)
    parser.add_argument("--per-node", type=positive, default=8, help="ranks of a node (simulation)")
    parser.add_argument("--tp", type=positive, default=8)
    parser.add_argument("--pp", type=positive, default=1)
    parser.add_argument("--ep", type=positive, default=1, help="expert parallel (simulation)")
    parser.add_argument("--tp-g", type=positive, default=2)
    parser.add_argument("--pools", action="store_true", help="the first half of the ranks trains, the second generates")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--bucket-mib", type=positive, default=256)
    parser.add_argument("--repeats", type=positive, default=5)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    try:
        if arguments.simulate:
            print(simulate(arguments))
        elif "RANK" in os.environ:
            device = Device.detect("auto")
            device.activate()
            dist.init_process_group(device.backend)
            bench(arguments)
            dist.destroy_process_group()
        else:
            layouts(arguments, arguments.ranks)  # refused here, not once by every rank
            return local_ranks(arguments.ranks, bench, arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
