"""metrics.jsonl: strict JSON, every value back as it was, and no line lost or spoiled by a killed process."""

import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.errors import DataError
from hybridflow.observe.metrics import MetricsWriter, read_metrics


def refuse(word):
    raise AssertionError(f"{word} is not JSON")


def same(a, b):
    return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))


@given(values=st.dictionaries(st.text(min_size=1).filter(lambda name: name != "step"), st.floats() | st.integers(-(2**53), 2**53)))
def test_round_trip_of_any_number(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(5, values)
    (line,) = path.read_text(encoding="utf-8").split("\n")[:-1]
    json.loads(line, parse_constant=refuse)
    (row,) = read_metrics(path)
    assert row.pop("step") == 5
    assert row.keys() == values.keys()
    assert all(same(float(row[name]), float(values[name])) for name in values)


def test_non_finite_values_are_strings_in_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"loss": math.nan, "up": math.inf, "down": torch.tensor(-math.inf)})
    assert json.loads(path.read_text(), parse_constant=refuse) == {"step": 1, "loss": "NaN", "up": "Infinity", "down": "-Infinity"}
    (row,) = read_metrics(path)
    assert math.isnan(row["loss"]) and row["up"] == math.inf and row["down"] == -math.inf


def test_scalars_of_torch_and_numpy(tmp_path):
    with MetricsWriter(tmp_path / "m") as writer:
        writer.write(np.int64(2), {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": torch.tensor(3), "d": True})
    assert read_metrics(tmp_path / "m") == [{"step": 2, "a": 0.5, "b": 0.25, "c": 3, "d": 1}]


@pytest.mark.parametrize("value", ["0.5", None, [1.0]])
def test_what_is_no_number_is_refused_and_writes_nothing(tmp_path, value):
    with MetricsWriter(tmp_path / "m") as writer:
        with pytest.raises(TypeError, match="'reward/mean'"):
            writer.write(1, {"reward/mean": value})
    assert read_metrics(tmp_path / "m") == []


def test_a_metric_named_step_is_refused(tmp_path):
    with MetricsWriter(tmp_path / "m") as writer, pytest.raises(ValueError, match="step"):
        writer.write(1, {"step": 2})


def test_every_step_is_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path / "m")
    for step in (1, 2):
        writer.write(step, {"loss": 0.5})
        assert [row["step"] for row in read_metrics(tmp_path / "m")] == list(range(1, step + 1))
    writer.close()


def test_torn_last_line_is_neither_read_nor_continued(tmp_path):
    path = tmp_path / "m"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1]
    with MetricsWriter(path) as writer:
        writer.write(2, {"loss": 2.0})
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


@pytest.mark.parametrize("bad", ["{", "[1]", '{"loss": 1.0}'])
def test_malformed_line_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_metrics(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="no metrics at"):
        read_metrics(tmp_path / "metrics.jsonl")
