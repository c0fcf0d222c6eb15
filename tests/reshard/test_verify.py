"""Checksums after a sync: silent when all is well, exact when it is not."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridflow.config.layout import Layout
from hybridflow.errors import WeightsDifferError
from hybridflow.models.tensor_files import KEPT_FLOAT32
from hybridflow.models.weight_map import WeightMap
from hybridflow.reshard.execute import Resharder
from hybridflow.reshard.grouping import generation_layout
from hybridflow.reshard.hybrid import hybrid_plan
from hybridflow.reshard.ledger import Ledger
from hybridflow.reshard.verify import CHUNK, checksum, differing, transfer
from tests.ranks import RankPool
from tests.reshard.random_layouts import blank, expected, fill, random_logical
from tests.reshard.test_execute import tiny_weights

LAYOUT, TP_G = Layout(4, tp=2, pp=2), 1
NAME = "model.layers.3.mlp.down_proj.weight"


def sync_and_damage(weights: WeightMap) -> list[list[str]]:
    """On a rank: differing() right after a sync, after a wrong bit that came from another rank, after two swapped elements
    of a local copy, after dirty padding, and after repairing all of it."""
    rank = dist.get_rank()
    generation = generation_layout(LAYOUT, TP_G)
    source = fill(weights.megatron(LAYOUT, rank), random_logical(weights.logical), torch.bfloat16)
    target = blank(weights.vllm(TP_G, generation.position(rank)[1]), torch.bfloat16)
    resharder = Resharder(hybrid_plan(weights, LAYOUT, generation, node_of=[0] * 4), rank, source, target, None, 8 << 10)
    resharder.run()
    found = [differing(resharder)]
    if rank == 1:  # of the first stage: layer 3 came from ranks of the second
        target[NAME].view(torch.int16)[5, 40] ^= 1
    found.append(differing(resharder))
    resharder.run()
    if rank == 3:
        pair = target[NAME][7, 30:32].clone()
        target[NAME][7, 30:32] = pair.flip(0)
    found.append(differing(resharder))
    resharder.run()
    if rank == 0:
        target["model.embed_tokens.weight"][-1, -1] = 1.0
    found.append(differing(resharder))
    resharder.run()
    found.append(differing(resharder))
    return found


def test_every_rank_learns_which_tensor_differs(four: RankPool) -> None:
    results = four.run(sync_and_damage, tiny_weights("llama", tied=True))
    assert all(result == results[0] for result in results)
    clean, bit, swapped, padding, repaired = results[0]
    assert clean == repaired == []
    assert len(bit) == 1 and bit[0].startswith(f"{NAME} of rank 1 at [0, 24]") and "of rank 3)" in bit[0]
    assert len(swapped) == 1 and swapped[0].startswith(f"{NAME} of rank 3")
    assert len(padding) == 1 and padding[0].startswith("model.embed_tokens.weight of rank 0") and "padding" in padding[0]


def corrupted_transfers(weights: WeightMap) -> list[str]:
    """On a rank: the errors of transfer() without and with checksums after which rank 2 has two wrong weights, and of a sound one."""
    rank, generation = dist.get_rank(), generation_layout(LAYOUT, TP_G)
    source = fill(weights.megatron(LAYOUT, rank), random_logical(weights.logical), torch.bfloat16)
    target = blank(weights.vllm(TP_G, generation.position(rank)[1]), torch.bfloat16)
    resharder = Resharder(hybrid_plan(weights, LAYOUT, generation, node_of=[0] * 4), rank, source, target, None, 8 << 10)
    run, ledger = resharder.pipeline.run, Ledger({"reshard": 60.0}, lambda: 0)

    def damaging(*arguments: object) -> None:
        run(*arguments)
        target[NAME][0, :] += 1
        target["model.norm.weight"] += 1

    def error(checksum: bool) -> str:
        try:
            report = transfer(resharder, ledger, 7, checksum=checksum)
        except WeightsDifferError as raised:
            return str(raised)
        assert report.buckets == len(resharder.buckets) and [record.name for record in ledger.records] == ["reshard"]
        return ""

    resharder.pipeline.run = damaging if rank == 2 else run
    found = [error(False), error(True)]
    resharder.pipeline.run = run
    return [*found, error(True)]


def test_a_wrong_weight_ends_the_sync_on_every_rank_if_checksums_are_on(four: RankPool) -> None:
    results = four.run(corrupted_transfers, tiny_weights("llama", tied=True))
    assert all(result == results[0] for result in results)
    unseen, text, sound = results[0]
    assert unseen == sound == ""
    assert text.startswith("sync to version 7: ") and re.search(r"of rank 2 at \[.*\) and 2 regions more$", text), text


def sync_float32_bias(weights: WeightMap) -> tuple[list[str], list[str], list[str], list[str]]:
    """On a rank of a bfloat16 model: float32 tensors that came from other ranks, those of the target that are not the source's to the
    bit, and differing() before and after rank 0 flipped the last bit of one that came."""
    rank, generation = dist.get_rank(), generation_layout(LAYOUT, TP_G)
    logical = random_logical(weights.logical)
    shards = weights.megatron(LAYOUT, rank), weights.vllm(TP_G, generation.position(rank)[1])
    kept = [{name for name, parameter in shard.items() if parameter.pieces[0].tensor.endswith(KEPT_FLOAT32)} for shard in shards]
    whole, wanted = fill(shards[0], logical), expected(shards[1], logical)
    source = {name: tensor if name in kept[0] else tensor.bfloat16() for name, tensor in whole.items()}
    target = {name: torch.empty_like(tensor if name in kept[1] else tensor.bfloat16()) for name, tensor in wanted.items()}
    resharder = Resharder(hybrid_plan(weights, LAYOUT, generation, node_of=[0] * 4), rank, source, target, None, 8 << 10)
    resharder.run()
    came = sorted({move.target for moves in resharder.own.receives.values() for move in moves} & kept[1])
    wrong = [name for name in kept[1] if not torch.equal(target[name], wanted[name])]
    clean = differing(resharder)
    if rank == 0:
        target[came[0]].view(torch.int32)[0] ^= 1
    return came, wrong, clean, differing(resharder)


def test_a_float32_tensor_of_a_bfloat16_model_arrives_to_the_bit(four: RankPool) -> None:
    """Rounded, the bias of DeepSeek-V3's router would choose other experts than the trainer's."""
    for came, wrong, clean, flipped in four.run(sync_float32_bias, tiny_weights("deepseek_v3", tied=False)):
        assert came and wrong == clean == []
        assert len(flipped) == 1 and KEPT_FLOAT32 in flipped[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_a_checksum_is_the_weighted_sum_of_the_bit_patterns(dtype: torch.dtype) -> None:
    """Over more elements than are summed at a time: place i counts 2 i + 1 times, modulo 2^64."""
    values = torch.randn(CHUNK + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).numpy().astype(np.int64)
    wanted = (bits * (2 * np.arange(len(bits)) + 1)).sum()  # numpy wraps around as torch does
    assert int(checksum(values, dtype)) == int(wanted)


def test_checksums_see_every_element_and_its_place() -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    seen = {int(checksum(values, torch.float32))}
    for i in range(values.numel()):
        other = values.clone()
        other.view(-1)[i] = torch.nextafter(other.view(-1)[i], torch.tensor(9.0))
        seen.add(int(checksum(other, torch.float32)))
    assert len(seen) == values.numel() + 1
    assert int(checksum(values.t(), torch.float32)) != int(checksum(values, torch.float32))
    assert int(checksum(values.t().contiguous(), torch.float32)) == int(checksum(values.t(), torch.float32))
