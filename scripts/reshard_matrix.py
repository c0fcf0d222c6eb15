"""Every training layout to every generation layout on 8 CPU ranks, through vLLM, against Hugging Face.

    python scripts/reshard_matrix.py --out docs/results/reshard_matrix.md [--only tp2pp2dp2]

For each: sync, sample, compare log-probs with Hugging Face; one optimizer step; again. Models are tiny (vocabulary 101, fewer
key-value heads than generation ranks), in float32 and bfloat16, tied and untied; with experts where the layout deals them. Takes two
to four minutes a layout on two cores and 1 GiB a rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from hybridflow.config.layout import Layout
from tests.ranks import RankPool
from tests.tiny import make_tiny_model
from tests.workers import on_ranks
from tests.workers.test_layouts import PRELOAD, gap_to_hugging_face, prompts

LAYOUTS = {
    "tp2pp2dp2": Layout(8, tp=2, pp=2),
    "tp4pp2": Layout(8, tp=4, pp=2),
    "tp1pp4dp2": Layout(8, pp=4),
    "tp2pp2vpp2dp2": Layout(8, tp=2, pp=2, vpp=2),
    "tp2pp2ep2dp2": Layout(8, tp=2, pp=2, ep=2),
}
# name, family, tied, dtype; bound of the largest |log-prob| gap to Hugging Face in the same dtype
DENSE = [("llama-tied-fp32", "llama", True, "float32", 5e-5), ("qwen2-untied-bf16", "qwen2", False, "bfloat16", 0.25)]
# Not in bfloat16: two engines that round differently then choose other experts for some tokens.
EXPERTS = [("mixtral-untied-fp32", "mixtral", False, "float32", 5e-5)]
SIZES = (1, 2, 4, 8)


@dataclass
class Row:
    layout: str
    model: str
    tp_g: int
    shared: str
    received: int
    gaps: list[float]
    probes: list[float]

    def text(self, bound: float) -> str:
        gaps, probes = (" / ".join(f"{value:.1e}" for value in values) for values in (self.gaps, self.probes))
        good = "yes" if max(self.gaps) <= bound else "NO"
        return f"| {self.layout} | {self.model} | {self.tp_g} | {self.shared} | {self.received} | {gaps} | {probes} | {good} |"


HEADER = ("| training | model | TP_g | shared weights | bytes received | gap to Hugging Face (before / after a step) | probe | "
          "within bound |\n"
          "|---|---|---|---|---|---|---|---|")


def check_layout(name: str, folder: Path) -> list[Row]:
    """All models and generation sizes of one training layout, in one pool of ranks."""
    layout, rows = LAYOUTS[name], []
    with RankPool(layout.world, timeout=500, preload=PRELOAD) as pool:
        for model, family, tied, dtype, _ in EXPERTS if layout.ep > 1 else DENSE:
            path = make_tiny_model(folder / f"{name}-{model}", family, hidden=256, heads=8, kv_heads=max(2, layout.tp), tied=tied)
            rows += _check_model(pool, name, layout, model, path, dtype)
    return rows


def _check_model(pool: RankPool, name: str, layout: Layout, model: str, path: str, dtype: str) -> list[Row]:
    pool.run(on_ranks.start, model, path, layout, dtype)
    rows = {}
    for tp_g in SIZES:
        shared = pool.run(on_ranks.attach, model, tp_g)
        rows[tp_g] = Row(name, model, tp_g, f"{shared[0][0]} of {shared[0][1]}", 0, [], [])
    for version in (0, 1):
        for tp_g, row in rows.items():
            results = pool.run(on_ranks.generate, model, tp_g, version, prompts())
            if any(wrong for _, _, wrong, _ in results):
                raise AssertionError(f"{name} {model} tp_g {tp_g}: checksums differ: {results[0][2]}")
            row.gaps.append(max(gap_to_hugging_face(path, batch, getattr(torch, dtype)) for batch, *_ in results))
            row.probes.append(max(gap for _, gap, _, _ in results))
            row.received = max(received for *_, received in results)
        if version == 0:
            path = f"{path}-updated"
            pool.run(on_ranks.update, model, path)
    return list(rows.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--out", type=Path, help="file to append the table to")
    arguments = parser.parse_args()
    bounds = {model: bound for model, *_, bound in DENSE + EXPERTS}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            start = time.perf_counter()
            found = check_layout(name, Path(folder))
            rows += found
            print("\n".join([f"{name}: {time.perf_counter() - start:.0f} s", HEADER, *(row.text(bounds[row.model]) for row in found)]),
                  flush=True)
    if arguments.out:
        table = "\n".join([HEADER, *(row.text(bounds[row.model]) for row in rows)])
        with arguments.out.open("a") as file:
            file.write(table + "\n")
    return 1 if any(max(row.gaps) > bounds[row.model] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
