"""Hugging Face safetensors in and out of sharded parameters, one slice at a time.

`load_shards` fills this rank's tensors from a model folder. `export` gathers the logical tensors on rank 0, one by one, and
writes a model folder that is complete or absent. Both work from ShardParameters: how a model is cut is the weight map's knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.config.layout import Layout
from hybridflow.errors import ModelError
from hybridflow.models.model_folder import ModelFolderWriter
from hybridflow.models.shards import Box, Piece, ShardParameter
from hybridflow.models.tensor_files import CODES, DTYPES, KEPT_FLOAT32, TensorFiles, TensorInfo, stored_dtype
from hybridflow.models.weight_map import WeightMap

READ_BYTES = 64 << 20  # host memory of one read
FILE_BYTES = 5 << 30  # size limit of one exported file
TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # stored twice by some tied checkpoints; must then be equal
Shapes = Mapping[str, tuple[int, ...]]


def load_shards(
    path: str,
    parameters: Mapping[str, ShardParameter],
    into: Mapping[str, torch.Tensor],
    expected: Shapes | None = None,
    ignored: Collection[str] = (),
) -> None:
    """Fills `into[name]` for every parameter, reading only its pieces; what no piece covers (padding) becomes zero.

    bfloat16, float16 and float32 files are cast to the dtype of `into`. With `expected` (WeightMap.logical) the whole folder is
    checked: shapes must be equal and nothing but `ignored` may be surplus. Host memory: READ_BYTES beside the parameters.
    Raises ModelError listing every missing, misshaped, surplus or oddly typed tensor, before anything is written.
    """
    files = _checked_files(path, _parameter_problems(parameters, into), parameters, expected, ignored)
    duplicates = _duplicates(files, expected, ignored)
    with torch.no_grad():
        for name, parameter in parameters.items():
            _fill(files, parameter, into[name], duplicates)


def logical_tensors(path: str | Path, expected: Shapes) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model folder that must hold exactly `expected` (WeightMap.logical), in that order, in the file's dtype.

    Raises ModelError as load_shards does, before the first. Host memory: one tensor.
    """
    files = _checked_files(path, [], {}, expected, ())
    duplicates = _duplicates(files, expected, ())
    wholes = {name: Box(tuple(0 for _ in shape), tuple(shape)) for name, shape in expected.items()}
    return ((name, _read(files, name, whole, duplicates)) for name, whole in wholes.items())


def _checked_files(
    path: str | Path, problems: list[str], parameters: Mapping[str, ShardParameter], expected: Shapes | None, ignored: Collection[str]
) -> TensorFiles:
    files = TensorFiles(path)
    problems = problems + file_problems(files.tensors, parameters, expected, ignored)
    if problems:
        raise ModelError(f"{path} does not fit the model:\n  " + "\n  ".join(problems))
    return files


def _duplicates(files: TensorFiles, expected: Shapes | None, ignored: Collection[str]) -> dict[str, str]:
    """Tied tensors of the model that the folder stores a second time, under a name of its own: tensor -> that name."""
    surplus = set(files.tensors).difference(expected or files.tensors, ignored)
    return {kept: twin for twin, kept in TIED.items() if twin in surplus}


def _read(files: TensorFiles, name: str, region: Box, duplicates: Mapping[str, str]) -> torch.Tensor:
    values, twin = files.read(name, region), duplicates.get(name)
    if twin is not None and not torch.equal(values, files.read(twin, region)):
        raise ModelError(f"{files.path}: tie_word_embeddings is true but {twin} differs from {name}; set it to false")
    return values


def _fill(files: TensorFiles, parameter: ShardParameter, target: torch.Tensor, duplicates: Mapping[str, str]) -> None:
    if sum(piece.box.size for piece in parameter.pieces) < target.numel():
        target.zero_()
    for piece in parameter.pieces:
        for region in _chunks(piece.box, READ_BYTES // 4):
            target[piece.local(region).slices()].copy_(_read(files, piece.tensor, region, duplicates))


def _chunks(box: Box, elements: int) -> Iterator[Box]:
    """`box` cut along dimension 0 into parts of at most `elements` elements (one row at least)."""
    rows = max(1, elements // max(1, box.size // box.shape[0]))
    for start in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - start)
        yield Box((box.start[0] + start, *box.start[1:]), (count, *box.shape[1:]))


def _parameter_problems(parameters: Mapping[str, ShardParameter], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    problems = [f"the engine has no parameter {name}" for name in parameters if name not in tensors]
    problems += [f"the weight map has no parameter {name}" for name in tensors if name not in parameters]
    for name, parameter in parameters.items():
        if name in tensors and tuple(tensors[name].shape) != parameter.shape:
            shapes = f"{list(tensors[name].shape)} in the engine, {list(parameter.shape)} in the weight map"
            problems.append(f"parameter {name} has shape {shapes}")
    return problems


def file_problems(
    found: Mapping[str, TensorInfo], parameters: Mapping[str, ShardParameter], expected: Shapes | None, ignored: Collection[str]
) -> list[str]:
    """Differences between the files and the model. Without `expected`, only what the pieces need is known."""
    least: dict[str, tuple[int, ...]] = {}
    for piece in (piece for parameter in parameters.values() for piece in parameter.pieces):
        stop = piece.box.stop
        least[piece.tensor] = tuple(map(max, stop, least.get(piece.tensor, stop)))
    wanted = least if expected is None else expected
    problems = [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in found]
    for name, shape in wanted.items():
        if name not in found:
            continue
        info = found[name]
        exact = info.shape == tuple(shape)
        if not exact and (expected is not None or len(info.shape) != len(shape) or any(a < b for a, b in zip(info.shape, shape))):
            problems.append(f"misshaped: {name} is {list(info.shape)} in {info.file}, {list(shape)} in the model")
        if info.dtype not in DTYPES:
            problems.append(f"dtype {info.dtype} of {name} in {info.file} is not supported; supported: {', '.join(DTYPES)}")
    if expected is not None:
        unknown = {name: info for name, info in found.items() if name not in ignored and not _known(name, info, expected)}
        problems += [f"surplus: {name} {list(info.shape)} in {info.file}" for name, info in unknown.items()]
    return problems


def _known(name: str, info: TensorInfo, expected: Shapes) -> bool:
    if name in expected or name.endswith("rotary_emb.inv_freq"):  # old Llama checkpoints store the rotary frequencies
        return True
    if _predicts_further(name, expected):
        return True
    return name in TIED and expected.get(TIED[name]) == info.shape


def _predicts_further(name: str, expected: Shapes) -> bool:
    """Whether the tensor is of DeepSeek-V3's layer behind the last, which predicts a second token: no part of the model."""
    number = name.removeprefix("model.layers.").split(".", 1)[0]
    last = f"model.layers.{int(number) - 1}.mlp.gate.{KEPT_FLOAT32}" if number.isdigit() else ""
    return last in expected and f"model.layers.{number}.input_layernorm.weight" not in expected


@dataclass(frozen=True)
class _Source:
    """A region of a logical tensor, and the rank and parameter that hold it."""

    rank: int
    parameter: str
    piece: Piece

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors[self.parameter].detach()[self.piece.local(self.piece.box).slices()]


def _sources(weights: WeightMap, layout: Layout) -> dict[str, list[_Source]]:
    """For every logical tensor, regions that cover it exactly once, each from the lowest rank that holds it, by rank."""
    result: dict[str, list[_Source]] = {name: [] for name in weights.logical}
    taken: set[tuple[str, Box]] = set()
    for rank in range(layout.world):
        for parameter in weights.megatron(layout, rank).values():
            for piece in parameter.pieces:
                if (piece.tensor, piece.box) not in taken:
                    taken.add((piece.tensor, piece.box))
                    result[piece.tensor].append(_Source(rank, parameter.name, piece))
    for name, shape in weights.logical.items():
        covered, size = sum(source.piece.box.size for source in result[name]), torch.Size(shape).numel()
        if covered != size:
            raise ModelError(f"the ranks hold {covered} elements of {name} {list(shape)}, which has {size}; nothing was exported")
    return result


def _gather(
    shape: tuple[int, ...], sources: list[_Source], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, rank: int
) -> torch.Tensor | None:
    """One logical tensor, on the CPU of rank 0 (None elsewhere); one message from each rank that holds a part of it."""
    whole = torch.empty(shape, dtype=dtype) if rank == 0 else None
    device = next(iter(tensors.values())).device
    for owner, group in groupby(sources, key=lambda source: source.rank):
        parts = list(group)
        if whole is not None and owner == 0:
            for part in parts:
                whole[part.piece.box.slices()] = part.values(tensors).to("cpu", dtype)
        elif rank == owner:
            dist.send(torch.cat([part.values(tensors).to(dtype).reshape(-1) for part in parts]), dst=0)
        elif whole is not None:
            sizes = [part.piece.box.size for part in parts]
            message = torch.empty(sum(sizes), dtype=dtype, device=device)
            dist.recv(message, src=owner)
            for part, values in zip(parts, message.cpu().split(sizes)):
                whole[part.piece.box.slices()] = values.view(part.piece.box.shape)
    return whole


def _agree(writer: ModelFolderWriter | None, distributed: bool) -> None:
    """Every rank learns from rank 0 whether writing failed, and raises the same ModelError."""
    verdict = [writer.failure if writer is not None else None]
    if distributed:
        dist.broadcast_object_list(verdict, src=0)
    if verdict[0] is not None:
        raise ModelError(verdict[0])


def export(
    path: str,
    *,
    source: str,
    weights: WeightMap,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
    replace: bool = False,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Writes the model as a Hugging Face folder at `path`. Collective over the default group (or one process without a group).

    `source`: the folder the model came from; its config.json, generation settings and tokenizer files go along.
    `tensors`: this rank's live tensors by global Megatron name. `dtype` of the files; None: that of the tensors.
    `complete`: called on rank 0 with the folder before it takes its name, to add files.
    `file_bytes`: size limit of one file; more become several with an index. An existing `path` is refused unless `replace`, and
    then stays until its successor is complete. Host memory on rank 0: one logical tensor and one rank's part of it.
    Raises ModelError on every rank when rank 0 cannot write; `path` is then as it was before.
    """
    distributed = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if distributed else 0
    problems = _parameter_problems(weights.megatron(layout, rank), tensors)
    if problems:
        raise ModelError("export: the tensors do not fit the weight map:\n  " + "\n  ".join(problems))
    kind = dtype or next(iter(tensors.values())).dtype
    if kind not in CODES:
        raise ModelError(f"export in {kind} is not supported; supported: {', '.join(str(known) for known in CODES)}")
    sources = _sources(weights, layout)
    writer = None
    if rank == 0:
        writer = ModelFolderWriter(path, source, weights.logical, kind, head=weights.head, file_bytes=file_bytes, replace=replace)
        writer.start()
    _agree(writer, distributed)
    for name, shape in weights.logical.items():
        whole = _gather(shape, sources[name], tensors, stored_dtype(name, kind), rank)
        if writer is not None:
            writer.put(whole)
    if writer is not None:
        writer.finish(complete)
    _agree(writer, distributed)
