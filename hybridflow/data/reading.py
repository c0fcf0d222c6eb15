"""Rows of data files: parquet, JSONL and Hugging Face dataset folders become plain dictionaries that know where they stood."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet

from hybridflow.errors import DataError

FORMATS = "parquet (.parquet), JSON lines (.jsonl, .json) or a folder written by datasets.Dataset.save_to_disk"


@dataclass(frozen=True)
class Row:
    """One row of a data file. place: where a person finds it, e.g. `train.jsonl, line 3`."""

    values: dict[str, Any]
    place: str


@dataclass
class RowSet:
    rows: list[Row]
    malformed: int = 0  # lines left out because they could not be read


def read_files(files: Sequence[str], *, skip_malformed: bool) -> RowSet:
    """All rows of all files in order. Raises DataError for a file that is missing, empty, unreadable or of another format.

    skip_malformed: leave out (and count) JSON lines that cannot be parsed instead of raising.
    """
    if not files:
        raise DataError("no data file given: set data.train_files=[FILE, ...]")
    result = RowSet([])
    for name in files:
        part = _read_file(Path(name), skip_malformed)
        if not part.rows:
            skipped = f" ({part.malformed} malformed lines were skipped)" if part.malformed else ""
            raise DataError(f"{name} holds no rows{skipped}; give a file with at least one")
        result.rows += part.rows
        result.malformed += part.malformed
    return result


def _read_file(path: Path, skip_malformed: bool) -> RowSet:
    if not path.exists():
        raise DataError(f"{path} does not exist (looked in {path.absolute().parent}); correct data.train_files or data.val_files")
    if path.is_dir():
        return RowSet(_read_dataset_folder(path))
    if path.suffix == ".parquet":
        return RowSet(_read_parquet(path))
    if path.suffix in (".jsonl", ".json"):
        return _read_json_lines(path, skip_malformed)
    raise DataError(f"{path} has the unknown format {path.suffix or '(no suffix)'!r}; supported: {FORMATS}")


def _read_parquet(path: Path) -> list[Row]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    return [Row(values, f"{path}, row {i}") for i, values in enumerate(table.to_pylist())]


def _read_dataset_folder(path: Path) -> list[Row]:
    if not (path / "state.json").exists() and not (path / "dataset_dict.json").exists():
        raise DataError(f"{path} is a folder, but not one written by datasets.Dataset.save_to_disk; supported: {FORMATS}")
    try:
        dataset = datasets.load_from_disk(str(path))
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is not a readable Hugging Face dataset folder: {error}") from error
    if isinstance(dataset, datasets.DatasetDict):
        raise DataError(f"{path} holds the splits {sorted(dataset)}; name one of them, e.g. {path / sorted(dataset)[0]}")
    return [Row(values, f"{path}, row {i}") for i, values in enumerate(dataset.with_format(None).to_list())]


def _read_json_lines(path: Path, skip_malformed: bool) -> RowSet:
    result = RowSet([])
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                result.rows.append(Row(_parse_line(line, place), place))
            except DataError:
                if not skip_malformed:
                    raise
                result.malformed += 1
    return result


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    fix = "correct the line, or set data.malformed_rows=skip to leave such lines out (counted)"
    try:
        values = json.loads(line.decode("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        array = " (a JSON array? one object per line is expected)" if line.lstrip().startswith(b"[") else ""
        raise DataError(f"{place}: not valid JSON{array}: {error}; text: {_excerpt(line)}; {fix}") from error
    if not isinstance(values, dict):
        raise DataError(f"{place}: a JSON object was expected, got {type(values).__name__}: {_excerpt(line)}; {fix}")
    return values


def _excerpt(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 80 else text[:77] + "...")
