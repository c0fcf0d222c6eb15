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

from hybridflow.config.layout import Layout, stage_layers
from hybridflow.errors import ModelError
from hybridflow.models.cuts import Entry, Shape, padded_vocab
from hybridflow.models.families import llama, mistral, qwen2, qwen3
from hybridflow.models.families.dense import Family, embedding, final_norm, output_layer, score
from hybridflow.models.settings import MegatronSettings, facts_of
from hybridflow.models.shards import ShardParameter

__all__ = ["FAMILIES", "HEADS", "WeightMap", "padded_vocab", "weight_map"]

HEADS = ("lm", "scalar")
FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)}


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
        for entry in self._table():
            self.logical.update(zip(entry.sources, entry.cut.logical()))
        self._cache: dict[tuple[object, ...], tuple[ShardParameter, ...]] = {}

    def _table(self) -> list[Entry]:
        layers = [entry for layer in self._layers for entry in layer]
        return [*self._first, *layers, *self._last, *([] if self.tied else [self._head])]

    def megatron(self, layout: Layout, rank: int) -> dict[str, ShardParameter]:
        """Parameters of global rank `rank`, keyed by Megatron name with global layer numbers.

        A tied model with pp > 1 has `output_layer.weight` on its last stage too, made of pieces of the embedding.
        Raises ModelError when the model does not divide into the layout.
        """
        at = layout.coordinates(rank)
        key = ("megatron", layout.tp, layout.pp, layout.vpp, layout.ep, at.tp, at.pp)
        if key not in self._cache:
            self._refuse(layout)
            entries = self._stage(layout, at.pp)
            self._cache[key] = tuple(ShardParameter(e.megatron, *e.cut.megatron(e.sources, layout.tp, at.tp)) for e in entries)
        return {parameter.name: parameter for parameter in self._cache[key]}

    def vllm(self, tp: int, tp_rank: int) -> dict[str, ShardParameter]:
        """Parameters of tensor-parallel rank `tp_rank` of a vLLM replica, keyed by vLLM name.

        Raises ModelError when vLLM cannot cut the model over `tp` ranks.
        """
        key = ("vllm", tp, tp_rank)
        if key not in self._cache:
            self._raise(self.tensor_parallel_problems(tp, "vllm"))
            self._cache[key] = tuple(ShardParameter(e.vllm, *e.cut.vllm(e.sources, tp, tp_rank)) for e in self._table())
        return {parameter.name: parameter for parameter in self._cache[key]}

    def tensor_parallel_problems(self, tp: int, engine: str) -> list[str]:
        """Why `tp` cannot work in `engine` ("megatron" or "vllm"), with the nearest that does; empty when it can."""
        problems = self._refusals(tp, engine)
        if not problems:
            return []
        works = [t for t in range(1, 2 * tp + 1) if not self._refusals(t, engine)]
        nearest = [t for t in works if t < tp][-1:] + [t for t in works if t > tp][:1]
        sizes = " or ".join(map(str, nearest))
        return [f"{self.family} in {engine}: {'; '.join(problems)}; nearest tensor parallel size that works: {sizes}"]

    def _refusals(self, tp: int, engine: str) -> list[str]:
        return list(dict.fromkeys(problem for entry in self._table() for problem in entry.cut.refusals(tp, engine)))

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
        layers, chunks = len(self._layers), layout.pp * layout.vpp
        if layers % chunks:
            nearest = min((c for c in range(1, layers + 1) if layers % c == 0), key=lambda c: (abs(c - chunks), c))
            asked = f"pp {layout.pp} x vpp {layout.vpp} = {chunks} chunks"
            problems.append(f"{layers} layers do not divide into {asked}; the nearest number of chunks that works is {nearest}")
        if layout.vpp > 1 and layout.pp == 1:
            problems.append(f"vpp {layout.vpp} needs pp > 1")
        if layout.ep > 1:
            problems.append(f"expert parallel {layout.ep} on a {self.family} model without experts; set ep to 1")
        self._raise(problems)

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
