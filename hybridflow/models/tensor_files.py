"""Safetensors files of a model folder: reading slices of one or many files, and writing them as a stream.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridflow.errors import ModelError
from hybridflow.models.shards import Box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MAPPED_BYTES = 256 << 20  # of files, touched before they are mapped anew: what was read stays in the process's memory until then
CODES = {dtype: code for code, dtype in DTYPES.items()}
KEPT_FLOAT32 = "e_score_correction_bias"  # of DeepSeek-V3: rounded, it would choose other experts; Hugging Face keeps it as well


@dataclass(frozen=True)
class TensorInfo:
    """What a file says of a tensor: full shape, safetensors dtype code ("BF16"), file name."""

    shape: tuple[int, ...]
    dtype: str
    file: str


def _index(file: Path) -> dict[str, str]:
    try:
        return dict(json.loads(file.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: not a safetensors index ({type(error).__name__}: {error})") from error


class TensorFiles:
    """The tensors of a model folder. Only headers are read at construction; `read` touches only the asked slice.

    Raises ModelError when the folder or a file is missing or corrupt.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if (self.path / INDEX).is_file():
            names = sorted(set(_index(self.path / INDEX).values()))
        elif (self.path / SINGLE).is_file():
            names = [SINGLE]
        else:
            raise ModelError(f"{self.path}: neither {SINGLE} nor {INDEX} there; give a Hugging Face model folder with safetensors weights")
        absent = [name for name in names if not (self.path / name).is_file()]
        if absent:
            raise ModelError(f"{self.path / INDEX} names files that are missing: {', '.join(absent)}")
        self._handles: dict[str, Any] = {name: self._open(self.path / name) for name in names}
        self._touched = 0  # bytes of mapped files
        self.tensors: dict[str, TensorInfo] = {}
        for name, handle in self._handles.items():
            for tensor in handle.keys():
                view = handle.get_slice(tensor)
                self.tensors[tensor] = TensorInfo(tuple(view.get_shape()), view.get_dtype(), name)

    @staticmethod
    def _open(file: Path) -> Any:
        try:
            return safe_open(str(file), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: corrupt or cut short ({error}); copy it again") from error

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The region `box` of tensor `name`, in the file's dtype, on the CPU."""
        info = self.tensors[name]
        values = self._handles[info.file].get_slice(name)[box.slices()]
        self._touched += box.shape[0] * (torch.Size(info.shape).numel() // max(1, info.shape[0])) * values.itemsize  # whole rows
        if self._touched > MAPPED_BYTES:
            self._handles = {file: self._open(self.path / file) for file in self._handles}
            self._touched = 0
        return values


def describe(path: str | Path) -> dict[str, TensorInfo]:
    """Every tensor of a model folder: shape, dtype and file, from the headers alone. Raises ModelError as TensorFiles does."""
    return TensorFiles(path).tensors


def split_files(shapes: Mapping[str, tuple[int, ...]], itemsize: int, limit: int) -> list[list[str]]:
    """Tensor names per file, in order, so that no file exceeds `limit` bytes unless one tensor alone does."""
    files: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * itemsize
        if files[-1] and used + size > limit:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


def file_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of tensor `name` in a model folder of `dtype`."""
    return torch.float32 if name.endswith(KEPT_FLOAT32) else dtype


class TensorStream:
    """Writes tensors in the order of `shapes` into safetensors files, of one dtype but for stored_dtype; one tensor is in memory."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, limit: int) -> None:
        self.folder, self.shapes, self.dtype = folder, dict(shapes), dtype
        self.files = split_files(shapes, dtype.itemsize, limit)
        self._writer = self._write()
        next(self._writer)

    def put(self, tensor: torch.Tensor) -> None:
        """The next tensor in the order of `shapes`; cast to its dtype in the folder."""
        self._writer.send(tensor)

    def close(self) -> None:
        """Ends the stream and writes the index of several files."""
        self._writer.close()
        names = file_names(len(self.files))
        if len(names) > 1:
            where = {tensor: name for name, tensors in zip(names, self.files) for tensor in tensors}
            total = sum(self._bytes(name) for name in self.shapes)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _bytes(self, name: str) -> int:
        return torch.Size(self.shapes[name]).numel() * stored_dtype(name, self.dtype).itemsize

    def _header(self, tensors: list[str]) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in tensors:
            end = offset + self._bytes(name)
            header[name] = {"dtype": CODES[stored_dtype(name, self.dtype)], "shape": list(self.shapes[name]), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format asks for data aligned to 8 bytes
        return len(text).to_bytes(8, "little") + text

    def _write(self) -> Generator[None, torch.Tensor, None]:
        for name, tensors in zip(file_names(len(self.files)), self.files):
            with open(self.folder / name, "wb") as file:
                file.write(self._header(tensors))
                for stored in tensors:
                    tensor = yield
                    file.write(tensor.to(stored_dtype(stored, self.dtype)).contiguous().reshape(-1).view(torch.uint8).numpy())
                file.flush()
                os.fsync(file.fileno())
        yield
