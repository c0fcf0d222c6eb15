"""The weight map: one table per model family, from which import, export and resharding derive.

    weights = weight_map(hf_config)
    weights.logical["model.embed_tokens.weight"]           # (vocabulary, hidden)
    weights.megatron(layout, rank)["output_layer.weight"]  # ShardParameter: shape on that rank, and the pieces that fill it
    weights.vllm(tp=4, tp_rank=1)["model.norm.weight"]

Pure Python: no torch, no process group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridflow.config.layout import Coordinates, Layout, stage_layers, stage_problem
from hybridflow.config.ranges import divisors, nearest_values
from hybridflow.errors import ModelError
from hybridflow.models.cuts import Entry, Shape
from hybridflow.models.families import deepseek, llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from hybridflow.models.families.dense import Family, embedding, final_norm, output_layer, score
from hybridflow.models.settings import MegatronSettings, facts_of
from hybridflow.models.shards import ShardParameter

__all__ = ["FAMILIES", "HEADS", "WeightMap", "weight_map"]

HEADS = ("lm", "scalar")
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        deepseek.V2, deepseek.V3, llama.FAMILY, mistral.FAMILY, mixtral.FAMILY, qwen2.FAMILY, qwen2_moe.FAMILY, qwen3.FAMILY,
        qwen3_moe.FAMILY,
    )
}  # fmt: skip


class WeightMap:
    """The tensors of one model and where each engine keeps them.

    `logical`: every tensor of the Hugging Face checkpoint -> full shape (a tied lm_head is absent).
    `settings`: what the Megatron engine is built from. `longest_sequence`: in tokens, see ModelFacts. `head`: "lm", or "scalar" for
    one number per position (critics, reward models), which takes the place of the language-model head and is tied to nothing.
    """

    def __init__(self, family: Family, hf_config: Any, head: str = "lm") -> None:
        shape = facts_of(hf_config)
        self.family = family.name
        self.longest_sequence = shape.longest_sequence
        self.head = head
        self.tied = shape.tied and head == "lm"
        self.vocab = shape.vocab
        settings = family.settings(hf_config)
        self.settings: MegatronSettings = replace(settings, gpt=settings.gpt | {"share_embeddings_and_output_weights": self.tied})
        self._first = [embedding(shape)]
        self._layers = [family.layer(hf_config, n) for n in range(shape.layers)]
        self._last = [final_norm(shape)]
        self._head = output_layer(shape) if head == "lm" else score(shape)
        self.logical: dict[str, Shape] = {}
        table = self._table()
        for entry in table:
            self.logical.update(zip(entry.sources, entry.cut.logical()))
        # Few are different, of tens of thousands in a model with many experts.
        self._cuts = dict.fromkeys(entry.cut for entry in table if entry.expert is None)
        self._expert_cuts = dict.fromkeys(entry.cut for entry in table if entry.expert is not None)
        self._cache: dict[tuple[object, ...], tuple[ShardParameter, ...]] = {}

    def _table(self) -> list[Entry]:
        layers = [entry for layer in self._layers for entry in layer]
        return [*self._first, *layers, *self._last, *([] if self.tied else [self._head])]

    def megatron(self, layout: Layout, rank: int) -> dict[str, ShardParameter]:
        """Parameters of global rank `rank`, keyed by Megatron name with global layer and expert numbers.

        A tied model with pp > 1 has `output_layer.weight` on its last stage too, made of pieces of the embedding.
        Raises ModelError when the model does not divide into the layout.
        """
        at = layout.coordinates(rank)
        key = ("megatron", layout.tp, layout.pp, layout.vpp, layout.ep, layout.etp, at.tp, at.pp, at.ep, at.etp)
        if key not in self._cache:
            self._refuse(layout)
            entries = [e for e in self._stage(layout, at.pp) if e.expert is None or self._owner(e.expert, layout.ep) == at.ep]
            self._cache[key] = tuple(self._megatron_shard(entry, layout, at) for entry in entries)
        return {parameter.name: parameter for parameter in self._cache[key]}

    def vllm(self, tp: int, tp_rank: int, ep: int = 1, body: int | None = None) -> dict[str, ShardParameter]:
        """Parameters of tensor-parallel rank `tp_rank` of a vLLM replica, keyed by vLLM name (experts: see Entry).

        `ep` 1: every rank holds a part of each expert; `ep` = tp: whole experts, each on one rank. `body`: the slice this rank
        holds of what may be held in any order (Cut.rank_order); default: that of its rank.
        Raises ModelError when vLLM cannot cut the model over `tp` ranks.
        """
        body = tp_rank if body is None else body
        key = ("vllm", tp, tp_rank, ep, body)
        if key not in self._cache:
            self._raise(self.vllm_problems(tp, ep))
            entries = [e for e in self._table() if e.expert is None or ep == 1 or self._owner(e.expert, ep) == tp_rank]
            self._cache[key] = tuple(self._vllm_shard(e, tp, tp_rank if e.cut.rank_order else body, ep) for e in entries)
        return {parameter.name: parameter for parameter in self._cache[key]}

    def _owner(self, expert: int, ep: int) -> int:
        """The expert-parallel rank that holds `expert`: each has a run of neighbours."""
        return expert // (self.settings.experts.routing.experts // ep)

    def _megatron_shard(self, entry: Entry, layout: Layout, at: Coordinates) -> ShardParameter:
        tp, rank = (layout.tp, at.tp) if entry.expert is None else (layout.etp, at.etp)
        return ShardParameter(entry.megatron, *entry.cut.megatron(entry.sources, tp, rank))

    def _vllm_shard(self, entry: Entry, tp: int, rank: int, ep: int) -> ShardParameter:
        if entry.expert is None:
            return ShardParameter(entry.vllm, *entry.cut.vllm(entry.sources, tp, rank))
        local = entry.expert % (self.settings.experts.routing.experts // ep)
        cut = entry.cut.vllm(entry.sources, tp, rank) if ep == 1 else entry.cut.vllm(entry.sources, 1, 0)
        return ShardParameter(f"{entry.vllm}.{local}", *cut)

    def vllm_problems(self, tp: int, ep: int = 1) -> list[str]:
        """Why vLLM cannot hold the model on `tp` ranks with experts dealt to `ep` of them; empty when it can."""
        problems = self.tensor_parallel_problems(tp, "vllm", experts_too=ep == 1)
        problems += self._expert_problems(ep, 1, "set it to 1")
        if ep not in (1, tp):
            problems.append(f"expert parallel {ep} in vLLM: it deals experts to all {tp} tensor-parallel ranks or to none; use 1 or {tp}")
        return problems

    def tensor_parallel_problems(self, tp: int, engine: str, experts_too: bool = False) -> list[str]:
        """Why `tp` cannot work in `engine` ("megatron" or "vllm"), with the nearest that does; empty when it can.

        `experts_too`: routed experts are cut by tp as well.
        """
        problems = self._refusals(tp, engine, experts_too)
        if not problems:
            return []
        works = [t for t in range(1, 2 * tp + 1) if not self._refusals(t, engine, experts_too)]
        nearest = [t for t in works if t < tp][-1:] + [t for t in works if t > tp][:1]
        sizes = " or ".join(map(str, nearest))
        return [f"{self.family} in {engine}: {'; '.join(problems)}; nearest tensor parallel size that works: {sizes}"]

    def _refusals(self, tp: int, engine: str, experts_too: bool) -> list[str]:
        cuts = [*self._cuts, *(self._expert_cuts if experts_too else ())]
        return list(dict.fromkeys(problem for cut in cuts for problem in cut.refusals(tp, engine)))

    def _stage(self, layout: Layout, pp: int) -> list[Entry]:
        """Table entries of one pipeline stage, its virtual chunks in order."""
        layers = [n for chunk in stage_layers(len(self._layers), layout.pp, layout.vpp)[pp] for n in chunk]
        entries = [entry for n in layers for entry in self._layers[n]]
        if pp == 0:
            entries = self._first + entries
        if pp == layout.pp - 1:
            copied = self.tied and layout.pp > 1
            entries = entries + self._last + ([self._head] if copied or not self.tied else [])
        return entries

    def _refuse(self, layout: Layout) -> None:
        problems = self.tensor_parallel_problems(layout.tp, "megatron")
        stages = stage_problem(len(self._layers), layout.pp, layout.vpp)
        if stages:
            problems.append(stages)
        problems += self._expert_problems(layout.ep, layout.etp, "set ep and etp to 1")
        self._raise(problems)

    def _expert_problems(self, ep: int, etp: int, remedy: str) -> list[str]:
        """Why experts cannot be dealt to `ep` ranks and each cut over `etp`; empty when they can."""
        experts = self.settings.experts
        if experts is None:
            asked = f"expert parallel {ep}, expert tensor parallel {etp} on a {self.family} model without experts; {remedy}"
            return [asked] if ep > 1 or etp > 1 else []
        count, rows = experts.routing.experts, experts.ffn
        parts = ((count, "experts", "expert parallel", ep), (rows, "rows of an expert", "expert tensor parallel", etp))
        return [
            f"{value} {what} do not divide by {kind} {asked}; nearest that works: {nearest_values(asked, divisors(value))}"
            for value, what, kind, asked in parts
            if value % asked
        ]

    @staticmethod
    def _raise(problems: list[str]) -> None:
        if problems:
            raise ModelError("\n".join(problems))


def weight_map(hf_config: Any, head: str = "lm") -> WeightMap:
    """The weight map of a Hugging Face configuration (its `model_type` names the family) with one of HEADS.

    Raises ModelError for an unsupported family, or a configuration the family cannot express.
    """
    if head not in HEADS:
        raise ValueError(f"head {head!r} is none of {', '.join(HEADS)}")
    name = getattr(hf_config, "model_type", None)
    if name not in FAMILIES:
        raise ModelError(f"model_type {name!r} is not supported; supported families: {', '.join(sorted(FAMILIES))}")
    return WeightMap(FAMILIES[name], hf_config, head)
