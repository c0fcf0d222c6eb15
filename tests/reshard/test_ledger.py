"""Deadlines and memory of phases."""

from __future__ import annotations

import time

import pytest

from hybridflow.engine.device import Device
from hybridflow.errors import DeviceMemoryError, PhaseTimeoutError
from hybridflow.reshard.ledger import GIB, Ledger, shortage, used_memory


def test_a_round_is_recorded() -> None:
    memory = iter([GIB, 3 * GIB, 3 * GIB, 2 * GIB, 2 * GIB, 4 * GIB])
    ledger = Ledger({"wake": 5.0, "sleep": 5.0}, lambda: next(memory))
    with ledger.phase("wake_weights", "wake"):
        time.sleep(0.02)
    with ledger.phase("sleep"):
        pass
    found = ledger.metrics()
    assert 0.02 <= found["seconds_wake_weights"] < 1 and found["memory_wake_weights"] == 3.0 and found["memory_sleep"] == 2.0
    with ledger.phase("wake_weights", "wake"):
        pass
    assert ledger.metrics()["memory_wake_weights"] == 4.0 and len(ledger.records) == 2
    assert "wake_weights" in ledger.text() and "4.000" in ledger.text()


def test_a_late_phase_is_named_with_its_setting() -> None:
    ledger = Ledger({"offload": 0.01}, lambda: 0)
    with pytest.raises(PhaseTimeoutError, match=r"phase 'offload' did not end within its 0.01 s: it ended.*rollout.deadlines.offload"):
        with ledger.phase("offload"):
            time.sleep(0.02)


def test_running_out_of_memory_is_a_typed_error_and_other_errors_stay() -> None:
    ledger = Ledger({"wake": 5.0}, lambda: 70 * GIB)
    with pytest.raises(DeviceMemoryError, match="'wake_kv' ran out of device memory, 70.00 GiB in use when it began: CUDA Error: out of"):
        with ledger.phase("wake_kv", "wake"):
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62")
    with pytest.raises(RuntimeError, match="another"):
        with ledger.phase("wake_kv", "wake"):
            raise RuntimeError("another error")


def test_a_shortage_says_how_many_bytes_of_what() -> None:
    assert shortage("waking the cache", 5 * GIB, 5 * GIB, {}, "") == ""
    text = shortage("waking the engine's kv_cache", 8 * GIB, 5 * GIB + 1, {"training weights": 3 * GIB, "nothing": 0}, "Lower it.")
    assert f"needs {8 * GIB} bytes (8.00 GiB), {5 * GIB + 1} are free: {3 * GIB - 1} bytes (3.00 GiB) are missing" in text
    assert "held by training weights 3.00 GiB. Lower it." in text


def test_memory_of_a_cpu_rank_is_its_resident_set() -> None:
    before = used_memory(Device("cpu"))
    block = bytearray(b"x" * (64 << 20))
    assert used_memory(Device("cpu")) - before > 48 << 20
    del block
