"""A model folder written anew: complete, one dtype, checked against the model it came from before it takes its name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridflow.errors import ExportError, ModelError
from hybridflow.models.checkpoint import FILE_BYTES, logical_tensors
from hybridflow.models.forward import forward_difference
from hybridflow.models.inspect import inspect_model
from hybridflow.models.model_folder import ModelFolderWriter
from hybridflow.models.settings import read_hf_config
from hybridflow.models.tensor_files import DTYPES, KEPT_FLOAT32, TensorInfo, describe, stored_dtype
from hybridflow.models.weight_map import WeightMap, weight_map

# Fields of config.json that may differ between a model and what it was trained from: they change no number of the forward pass.
BOOKKEEPING = frozenset({
    "dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "id2label", "label2id", "num_labels", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id",
})  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """What was written: tensors, bytes of weights, files, dtype, and the largest |logit| difference that rounding to it makes."""

    tensors: int
    size: int
    files: int
    dtype: torch.dtype
    logits_moved: float


def convert(
    model: str, to: str, *, source: str | None = None, dtype: torch.dtype | None = None, file_bytes: int = FILE_BYTES, replace: bool = False
) -> Conversion:
    """Writes the model folder `model` to `to`, with its config.json, generation settings and tokenizer files.

    `source`: the model it was trained from; names, shapes and configuration must be the same. `dtype`: of the files; None: the one
    they have. A forward pass of Hugging Face on `to` must give, to the bit, what it gives on `model` rounded to `dtype`.
    `replace`: an empty folder or a model folder may stand at `to`. Host memory: one tensor while writing, then one model in float32.
    Leaves `to` as it was, and raises ModelError when the model cannot be exported, ExportError when that failed.
    """
    if replace:
        _refuse_to_replace(Path(to))
    weights, found = inspect_model(model), describe(model)
    if source is not None:
        _compare_with_source(model, weights, source)
    kind = dtype or _one_dtype(model, found, weights)
    tensors = logical_tensors(model, weights.logical)
    writer = ModelFolderWriter(to, model, weights.logical, kind, head=weights.head, file_bytes=file_bytes, replace=replace)
    writer.start()
    if writer.failure is not None:
        raise ModelError(writer.failure)
    moved = _write(writer, model, tensors, weights)
    size = sum(torch.Size(shape).numel() for shape in weights.logical.values()) * kind.itemsize
    return Conversion(len(weights.logical), size, len({info.file for info in describe(to).values()}), kind, moved)


def _refuse_to_replace(folder: Path) -> None:
    """Only a model may be lost: a run's folder, or one with runs or models in it, holds more than its successor."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "config.json").is_file() or (folder / "status.json").is_file() or any(folder.glob("*/config.json")):
        raise ModelError(f"{folder.absolute()} is not replaced: it is no model folder, or holds more than one model; choose another path")


def _write(writer: ModelFolderWriter, model: str, tensors: Iterator[tuple[str, torch.Tensor]], weights: WeightMap) -> float:
    """Writes and compares; what forward_difference gives. Raises ExportError."""
    try:
        for name, tensor in tensors:
            writer.put(_rounded(name, tensor, stored_dtype(name, writer.dtype)))
            if writer.failure is not None:
                break
    except ModelError as error:
        writer.fail(error)
    moved: list[float] = []
    writer.finish(lambda folder: moved.append(forward_difference(model, folder, writer.dtype, weights)))
    if writer.failure is not None:
        raise ExportError(writer.failure)
    return moved[0]


def _one_dtype(model: str, found: Mapping[str, TensorInfo], weights: WeightMap) -> torch.dtype:
    codes = sorted({info.dtype for name, info in found.items() if name in weights.logical and not name.endswith(KEPT_FLOAT32)})
    if len(codes) > 1:
        raise ModelError(f"{model} has tensors of {' and '.join(codes)}; say which dtype the new files shall have")
    return DTYPES.get(codes[0], torch.float32) if codes else torch.float32  # one without support is listed when it is read


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = tensor.to(dtype)
    if not torch.isfinite(result).all():
        why = "it has values that are not finite" if not torch.isfinite(tensor).all() else f"its values do not fit {dtype}"
        raise ModelError(f"{name}: {why}")
    return result


def _compare_with_source(model: str, weights: WeightMap, source: str) -> None:
    """Raises ModelError listing every tensor and every configuration field in which the model is not the source's."""
    wanted, found = weight_map(read_hf_config(source), head=weights.head).logical, weights.logical
    problems = [f"missing: {name} {list(shape)}" for name, shape in wanted.items() if name not in found]
    problems += [f"surplus: {name} {list(shape)}" for name, shape in found.items() if name not in wanted]
    problems += [f"misshaped: {name} is {list(found[name])}, {list(shape)} in the source" for name, shape in wanted.items()
                 if found.get(name, shape) != shape]  # fmt: skip
    ours, theirs = _fields(model), _fields(source)
    differ = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    problems += [f"config.json: {key} is {ours.get(key)!r}, {theirs.get(key)!r} in the source" for key in differ]
    if problems:
        raise ModelError(f"{model} is not a model like its source {source}:\n  " + "\n  ".join(problems))


def _fields(folder: str) -> dict[str, Any]:
    content = json.loads((Path(folder) / "config.json").read_text())
    return {key: value for key, value in content.items() if key not in BOOKKEEPING and value is not None}
