"""Plans for large models without hardware: bytes inside and between nodes, seconds and memory of planning."""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable

import torch

from hybridflow.config.layout import GenerationLayout, Layout
from hybridflow.models.weight_map import weight_map
from hybridflow.reshard.grouping import consecutive, generation_layout
from hybridflow.reshard.hybrid import hybrid_plan
from hybridflow.reshard.plan import RankPlan, ReshardPlan
from scripts.bench.models import model_config

GB = 1e9
BYTES = 2  # bfloat16


def simulate(arguments: argparse.Namespace) -> str:
    """The table for arguments.simulate on arguments.ranks ranks."""
    weights = weight_map(model_config(arguments.simulate))
    layout = Layout(arguments.ranks, tp=arguments.tp, pp=arguments.pp, ep=arguments.ep)
    node_of = [rank // arguments.per_node for rank in range(layout.world)]
    stride = generation_layout(layout, arguments.tp_g)
    plain = GenerationLayout(layout.world, arguments.tp_g, consecutive(layout.world, arguments.tp_g))
    total = BYTES * sum(torch.Size(shape).numel() for shape in weights.logical.values())
    t, p, t_g = arguments.tp, arguments.pp, arguments.tp_g
    nodes = f"{layout.world} ranks on {node_of[-1] + 1} nodes"
    lines = [f"{arguments.simulate}: M = {total / GB:.1f} GB, {nodes}, tp {t} pp {p} ep {layout.ep} dp {layout.dp} -> tp_g {t_g}",
             f"{'GB per rank':<28} {'received':>9} {'/ M':>7} {'same node':>10} {'other nodes':>12} {'largest':>9}"]
    for name, generation in (("ours (paper's grouping)", stride), ("our plan, plain grouping", plain)):
        lines.append(_traffic(name, hybrid_plan(weights, layout, generation, node_of=node_of), total))
    gathered = (t * p - 1) / (t * p)
    lines.append(f"{'gather every tensor':<28} {gathered * total / GB:>9.2f} {gathered:>7.3f}")
    if t % t_g == 0 and arguments.ep == 1:
        lines.append(f"{'paper: ours':<28} {(t * p - t_g) / (t_g * t * p) * total / GB:>9.2f} {(t * p - t_g) / (t_g * t * p):>7.3f}")
    lines.append(_cost(arguments.simulate, layout, stride, node_of))
    return "\n".join(lines)


def _traffic(name: str, plan: ReshardPlan, total: int) -> str:
    """Means over all ranks, and the rank that receives most."""
    every = [plan.traffic(rank) for rank in range(plan.world)]
    inside, between = (BYTES * sum(getattr(traffic, kind) for traffic in every) / plan.world for kind in ("inside", "between"))
    largest = BYTES * max(traffic.received for traffic in every)
    return (f"{name:<28} {(inside + between) / GB:>9.2f} {(inside + between) / total:>7.3f} {inside / GB:>10.2f} {between / GB:>12.2f} "
            f"{largest / GB:>9.2f}")


def _cost(model: str, layout: Layout, generation: GenerationLayout, node_of: list[int]) -> str:
    """Seconds and peak memory of what one rank does: the weight map, the plan, and its own part of it."""
    config = model_config(model)

    def one() -> tuple[ReshardPlan, RankPlan]:
        plan = hybrid_plan(weight_map(config), layout, generation, node_of=node_of)
        return plan, plan.rank(layout.world - 1)

    seconds = _seconds(one)
    tracemalloc.start()
    kept = one()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    moves = len(kept[1].local) + sum(map(len, [*kept[1].receives.values(), *kept[1].sends.values()]))
    return f"planning on one rank: {seconds:.2f} s, {peak / 1e6:.0f} MB at most, {moves} moves of the last rank"


def _seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start
