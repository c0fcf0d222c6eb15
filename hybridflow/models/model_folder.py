"""A Hugging Face model folder as it is written: beside its place, verified, then renamed, so that it is complete or absent."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hybridflow.config.file_rules import PARTIAL
from hybridflow.errors import ModelError
from hybridflow.models.tensor_files import CODES, TensorInfo, TensorStream, describe, stored_dtype

Shapes = Mapping[str, tuple[int, ...]]

# What goes along with the weights, byte for byte: tokenizer, generation settings, chat templates, licences.
COMPANIONS = (
    "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*",
)  # fmt: skip


def verify(path: str | Path, shapes: Shapes, dtype: torch.dtype | None = None) -> dict[str, TensorInfo]:
    """What the folder holds, checked against `shapes` (WeightMap.logical) and `dtype`, from the files' headers.

    Raises ModelError listing all that is missing, surplus, misshaped or of another dtype, and for an unreadable file.
    """
    found = describe(path)
    problems = [f"missing: {name} {list(shape)}" for name, shape in shapes.items() if name not in found]
    problems += [f"surplus: {name} in {info.file}" for name, info in found.items() if name not in shapes]
    for name, info in found.items():
        if name in shapes and info.shape != tuple(shapes[name]):
            problems.append(f"misshaped: {name} is {list(info.shape)} in {info.file}, {list(shapes[name])} in the model")
        if dtype is not None and info.dtype != (code := CODES[stored_dtype(name, dtype)]):
            problems.append(f"dtype of {name} is {info.dtype} in {info.file}, {code} was asked")
    if problems:
        raise ModelError(f"{path} is not the model it should be:\n  " + "\n  ".join(problems))
    return found


def exported_config(text: str, dtype: torch.dtype, head: str) -> str:
    """config.json naming `dtype` and the architecture of `head`; unchanged, to the byte, where it already does."""
    config = json.loads(text)
    before = dict(config)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    if head == "scalar":
        config |= scalar_head_fields(config)
    if config == before:
        return text
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def scalar_head_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of a model with one score per sequence; Hugging Face would otherwise expect two labels."""
    fields: dict[str, Any] = {}
    if config.get("architectures"):
        fields["architectures"] = [name.split("For")[0] + "ForSequenceClassification" for name in config["architectures"]]
    if len(config.get("id2label", ())) != 1:
        fields |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return fields


class ModelFolderWriter:
    """Writes one model folder: `start`, `put` each tensor in the order of `shapes`, `finish`.

    Each step records the first failure in `failure` and later steps do nothing, so that the caller can go on receiving what other
    ranks send and tell them at the end. Until `finish` succeeds nothing exists at `path` that was not there before.
    """

    def __init__(self, path: str, source: str, shapes: Shapes, dtype: torch.dtype, *, file_bytes: int, replace: bool,
                 head: str = "lm") -> None:
        self.path, self.source = Path(path).absolute(), Path(source)
        self.partial = self.path.with_name(PARTIAL.format(self.path.name))
        self.shapes, self.dtype, self.file_bytes, self.replace = shapes, dtype, file_bytes, replace
        self.head = head
        self.failure: str | None = None
        self._stream: TensorStream | None = None

    def start(self) -> None:
        self._step(self._start)

    def put(self, tensor: torch.Tensor) -> None:
        self._step(lambda: self._stream.put(tensor))

    def finish(self, check: Callable[[Path], None] | None = None) -> None:
        """`check` is called with the complete folder before it takes its name; what it raises becomes the failure."""
        self._step(lambda: self._finish(check))

    def _step(self, action: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            action()
        except (OSError, ValueError, ModelError) as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Gives up because of `error`; nothing is left behind."""
        self.failure = f"export to {self.path} failed: {error}"
        shutil.rmtree(self.partial, ignore_errors=True)

    def _start(self) -> None:
        if not (self.source / "config.json").is_file():
            raise ModelError(f"no config.json in {self.source}, the model's source folder")
        if self.path.exists() and not self.replace:
            raise ModelError("it exists already; choose another path, or --replace a model folder")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        needed = sum(torch.Size(shape).numel() for shape in self.shapes.values()) * self.dtype.itemsize
        free = shutil.disk_usage(self.partial).free
        if free < needed:
            raise ModelError(f"it needs {needed} bytes and the disk has {free} free")
        self._copy_companions()
        self._stream = TensorStream(self.partial, self.shapes, self.dtype, self.file_bytes)

    def _copy_companions(self) -> None:
        text = (self.source / "config.json").read_bytes().decode()
        (self.partial / "config.json").write_bytes(exported_config(text, self.dtype, self.head).encode())
        for item in sorted({item for pattern in COMPANIONS for item in self.source.glob(pattern)}):
            copy = shutil.copytree if item.is_dir() else shutil.copyfile
            copy(item, self.partial / item.name)

    def _finish(self, check: Callable[[Path], None] | None) -> None:
        self._stream.close()
        verify(self.partial, self.shapes, self.dtype)
        if check is not None:
            check(self.partial)
        _sync(self.partial)
        old = self.path.with_name(f".{self.path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.path.exists():
            self.path.rename(old)  # a folder cannot be renamed over; a crash between the two lines leaves both, complete
        self.partial.rename(self.path)
        _sync(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Makes the folder's entries durable, so that a crash after the rename cannot leave empty files."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
