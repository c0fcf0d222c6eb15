"""Parity of the engine on real ranks with Hugging Face in float64, for any model, layout and batch. One call:

    compare(pool, layout, path)                        # a language model: log-probs, entropy, loss, metrics, every gradient, weights
    compare(pool, layout, path, {"head": "scalar"})    # a sequence-classification model: values and scores in place of log-probs
    compare_measure(pool, layout, path, {"shape": ...})    # the same for one batch without a step, on an engine that is kept

`options` (all optional): head, sequence_parallel, recompute, budget, rows, seed, longest, empty, steps, split, order_seed, shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hybridflow.config.layout import Layout
from tests.engine import ranks_jobs as jobs
from tests.engine.reference import Reference, load_model, reference_log_probs, reference_update, reference_values
from tests.engine.tiny import OPTIMIZER, clipped_ratio, value_and_score
from tests.ranks import RankPool

PRELOAD = ("hybridflow.engine.megatron", "transformers", "tests.engine.ranks_jobs")
RELATIVE = 1e-5


@dataclass(frozen=True)
class Bound:
    """Of a GPU: mean and largest error of log-probs and entropies; relative error of loss and gradient norm; distance of the gradients."""

    mean: float
    largest: float
    metrics: float
    gradients: float


EXACT = Bound(1e-5, 1e-4, 5e-5, 5e-5)
# By dtype, and whether there are experts: in bfloat16 a router may choose another, whose log-probs differ visibly. Gradients are 10 %
# away where tensor-parallel ranks add rounded parts.
TOLERANCE = {
    (torch.float32, False): EXACT, (torch.float32, True): EXACT,
    (torch.bfloat16, False): Bound(0.05, 0.5, 0.1, 0.15), (torch.bfloat16, True): Bound(0.1, 2.0, 0.15, 0.4),
}  # fmt: skip
TEMPERATURE = jobs.TEMPERATURE
Results = list[dict[str, Any]]


@dataclass(frozen=True)
class Ranks:
    """A pool, and the layout its ranks have: one for the life of a process."""

    pool: RankPool
    layout: Layout

    @property
    def sequence_parallel(self) -> bool:
        return self.layout.tp > 1


def start_ranks(layout: Layout, kind: str = "cpu") -> Iterator[Ranks]:
    """Body of a fixture."""
    with RankPool(layout.world, preload=PRELOAD, kind=kind) as pool:
        yield Ranks(pool, layout)


def compare(pool: RankPool, layout: Layout, path: str, options: jobs.Options | None = None) -> Results:
    """Runs jobs.train on the ranks and checks it; what the ranks returned."""
    options = options or {}
    results = pool.run(jobs.train, path, layout, options)
    check_scores(results, path, options)
    check_training(results, path, options)
    return results


def compare_measure(pool: RankPool, layout: Layout, path: str, options: jobs.Options) -> None:
    """Runs jobs.measure on the ranks and checks it. A language model has nothing to learn where all responses are empty."""
    results = pool.run(jobs.measure, path, layout, options)
    check_scores(results, path, options)
    if results[0]["gradients"]:
        check_training(results, path, options)


def scalar(options: jobs.Options) -> bool:
    return options.get("head") == "scalar"


def expected_update(path: str, options: jobs.Options, steps: int) -> Reference:
    model = load_model(path, scalar(options))
    batch = jobs.whole_batch(options)
    if scalar(options):
        return reference_update(model, batch, value_and_score, OPTIMIZER, steps=steps)
    return reference_update(
        model, batch, clipped_ratio, OPTIMIZER, temperature=TEMPERATURE, entropy=options.get("entropy", True), steps=steps
    )


def check_training(results: Results, path: str, options: jobs.Options) -> None:
    """Metrics of each step, gradients of the first, weights after the last; all ranks agree."""
    expected = expected_update(path, options, len(results[0]["metrics"]))
    assert all(result["metrics"] == results[0]["metrics"] for result in results), "ranks report different metrics"
    for metrics, reference in zip(results[0]["metrics"], expected.metrics):
        assert set(metrics) == {*reference, "lr"}
        for name, value in reference.items():
            assert close(metrics[name], value), f"{name}: {metrics[name]} instead of {value}"
    if results[0].get("gradients"):
        gradients = join(results, "gradients")
        assert gradients.keys() == expected.gradients.keys()
        for name, gradient in gradients.items():
            wanted = expected.gradients[name]
            assert (gradient.double() - wanted).abs().max() <= RELATIVE * wanted.abs().max(), f"gradient of {name}"
    if "shards" in results[0]:
        check_weights(results, expected)


def check_near(results: Results, path: str, options: jobs.Options, bound: Bound) -> None:
    """For GPUs: log-probs, entropy, metrics of each step and the first gradients are as near to float64 as `bound` says."""
    expected = expected_update(path, options, len(results[0]["metrics"]))
    with torch.no_grad():
        scored = reference_log_probs(load_model(path), jobs.whole_batch(options), TEMPERATURE)
    for name, values in zip(("log_prob", "entropy"), scored):
        by_row = {row: value for result in results for row, value in result[name].items()}
        gap = (torch.cat([by_row[row] for row in sorted(by_row)]).double() - values).abs()
        assert gap.mean() < bound.mean and gap.max() < bound.largest, f"{name}: mean {gap.mean():.2e}, largest {gap.max():.2e}"
    assert all(result["metrics"] == results[0]["metrics"] for result in results), "ranks report different metrics"
    for metrics, reference in zip(results[0]["metrics"], expected.metrics):
        for name in ("loss", "grad_norm"):
            assert close(metrics[name], reference[name], bound.metrics), f"{name}: {metrics[name]} instead of {reference[name]}"
    gradients = join(results, "gradients")
    assert gradients.keys() == expected.gradients.keys()
    wrong = sum(float((gradients[name].double() - wanted).square().sum()) for name, wanted in expected.gradients.items())
    size = sum(float(wanted.square().sum()) for wanted in expected.gradients.values())
    assert wrong**0.5 < bound.gradients * size**0.5, f"gradients are {(wrong / size) ** 0.5:.2e} of their norm away"


def check_weights(results: Results, expected: Reference) -> None:
    for name, tensor in join(results, "shards").items():
        moved = (expected.after[name] - expected.before[name]).abs().max()
        assert moved > 1e-4 or not expected.gradients[name].any(), f"{name} did not move"
        # 1e-5 of the update, not of the weight: a wrong decay group or clip factor would be far outside.
        assert (tensor.double() - expected.after[name]).abs().max() <= RELATIVE * (moved + expected.after[name].abs().max()), name


def check_scores(results: Results, path: str, options: jobs.Options) -> None:
    """What the engine computes without gradients: by response token, and the score of each row."""
    batch, model = jobs.whole_batch(options), load_model(path, scalar(options))
    lengths = batch["response_ids"].lengths.tolist()
    with torch.no_grad():
        if scalar(options):
            values, scores = reference_values(model, batch)
            expected = {"value": values.split(lengths), "score": list(scores)}
        else:
            log_prob, entropy = reference_log_probs(model, batch, TEMPERATURE)
            expected = {"log_prob": log_prob.split(lengths), "entropy": entropy.split(lengths)}
    for name, by_row in expected.items():
        seen = set()
        for result in results:
            for row, value in result[name].items():
                seen.add(row)
                assert value.dtype == torch.float32
                torch.testing.assert_close(value.double(), by_row[row], rtol=2e-6, atol=5e-6)
        assert seen == set(range(len(batch)))


def close(value: float, expected: float, relative: float = RELATIVE) -> bool:
    return abs(value - expected) <= relative * max(abs(expected), 0.1)  # a sum of terms of size 1 may cancel


def join(results: Results, key: str) -> dict[str, torch.Tensor]:
    """Logical tensors from the shards of all ranks; copies of a region must agree bit for bit."""
    boxes: dict[tuple, torch.Tensor] = {}
    for result in results:
        parameters, pieces = result[key], result["pieces"]
        assert set(parameters) == set(pieces)
        for name, parameter in pieces.items():
            for piece in parameter.pieces:
                part = parameters[name][piece.local(piece.box).slices()]
                first = boxes.setdefault((piece.tensor, piece.box), part)
                assert torch.equal(first, part), f"copies of {piece.tensor} differ"
    logical: dict[str, torch.Tensor] = {}
    for (tensor, box), part in boxes.items():
        shape = [max(b.stop[d] for (t, b) in boxes if t == tensor) for d in range(part.dim())]
        logical.setdefault(tensor, torch.zeros(shape, dtype=part.dtype))[box.slices()] = part
    return logical
