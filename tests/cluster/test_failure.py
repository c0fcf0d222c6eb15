"""First cause: pure rules, and real ranks that raise, die or stall."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.failure import Failure, describe_exception, exit_code, first_cause, worker_error
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.worker import RankProcess
from hybridflow.cluster.worker_group import WorkerGroup
from hybridflow.config.layout import Layout
from hybridflow.errors import ConfigError, HybridFlowError, NumericsError, ReshardError, RewardError, WorkerError
from tests.cluster.roles import Faulty


def failure(rank: int, at: float, error: BaseException) -> Failure:
    told = describe_exception(error, rank, "actor", "update")
    return Failure(**{**vars(told), "time": at})


def test_the_earliest_failure_that_is_no_lost_peer_is_the_cause() -> None:
    lost = failure(0, 1.0, RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2345"))
    late, early = failure(1, 3.0, ValueError("late")), failure(2, 2.0, ValueError("early"))
    assert lost.peer_lost and not late.peer_lost
    assert first_cause([lost, late, early]) is early
    assert first_cause([lost]) is lost


def test_a_sync_broken_by_a_dead_peer_is_not_the_cause() -> None:
    try:
        raise ReshardError("the transfer broke in bucket 3 of 9") from RuntimeError("Connection closed by peer [127.0.0.1]:2345")
    except ReshardError as error:
        broken = failure(0, 1.0, error)
    died = failure(1, 2.0, KeyError("whatever ended it"))
    assert broken.peer_lost and first_cause([broken, died]) is died
    assert not failure(0, 1.0, ReshardError("tensors differ")).peer_lost


def test_a_process_aborted_because_its_peer_died_is_not_the_cause(pool: ResourcePool, tmp_path: Path) -> None:
    """Rank 0 dies as torch's watchdog ends it, stacks of threads and all, before rank 1's death is seen."""
    group = start(pool, tmp_path)
    group.role("faulty").abort_for(lost=1)
    with pytest.raises(WorkerError, match=f"rank 1 .*process {group.places[1].pid} died"):
        group.role("faulty").stall(bad=0).get()


def test_a_typed_error_stays_typed() -> None:
    error = worker_error(failure(3, 0.0, NumericsError("loss is nan")))
    assert isinstance(error, WorkerError) and isinstance(error, NumericsError) and not isinstance(error, ConfigError)
    assert (error.rank, error.role, error.verb) == (3, "actor", "update") and "loss is nan" in str(error)
    config = worker_error(failure(0, 0.0, ConfigError(["a", "b"])))
    assert isinstance(config, ConfigError) and config.problems == ["a", "b"] and exit_code(config) == 2


def test_a_subclass_the_driver_does_not_know_becomes_its_nearest_known_class() -> None:
    class SandboxError(RewardError):
        pass

    error = worker_error(failure(0, 0.0, SandboxError("fork bomb")))
    assert isinstance(error, RewardError) and "SandboxError: fork bomb" in str(error)


@pytest.mark.parametrize(("error", "code"), [(None, 0), (HybridFlowError("x"), 1), (ConfigError("x"), 2), (KeyboardInterrupt(), 130),
                                             (SystemExit(143), 143), (SystemExit(None), 0), (SystemExit("text"), 1), (ValueError(), 1)])
def test_exit_codes(error: BaseException | None, code: int) -> None:
    assert exit_code(error) == code


@pytest.fixture
def pool(ray_cluster: Cluster) -> Iterator[ResourcePool]:
    pool = ResourcePool([2], "cpu")
    yield pool
    pool.close()


def start(pool: ResourcePool, tmp_path: object, phase_timeout: float = 60.0, environment: dict[str, str] | None = None,
          **kwargs: object) -> WorkerGroup:
    return WorkerGroup(pool, {"faulty": (Faulty, kwargs)}, layout=Layout(2, tp=2), start_timeout=120, phase_timeout=phase_timeout,
                       log_dir=str(tmp_path), environment=environment)


def test_one_rank_raises_while_its_peer_waits_in_a_collective(pool: ResourcePool, tmp_path: object) -> None:
    group = start(pool, tmp_path)
    begun = time.monotonic()
    with pytest.raises(NumericsError, match="loss is nan at step 3") as caught:
        group.role("faulty").raise_among_collective(bad=1).get()
    assert time.monotonic() - begun < 15
    assert isinstance(caught.value, WorkerError) and caught.value.rank == 1 and caught.value.verb == "raise_among_collective"
    assert "raise NumericsError" in caught.value.worker_traceback
    with pytest.raises(NumericsError):  # the group is over, and says why
        group.role("faulty").raise_plain(bad=0)


def test_a_failure_of_an_earlier_call_ends_a_later_wait(pool: ResourcePool, tmp_path: object) -> None:
    group = start(pool, tmp_path)
    group.role("faulty").raise_plain(bad=0)
    with pytest.raises(WorkerError, match="faulty rank 0.*raise_plain.*KeyError: 'no_such_tensor'"):
        group.role("faulty").stall(bad=1).get()


def test_a_killed_worker_is_named(pool: ResourcePool, tmp_path: object) -> None:
    check_killed_worker(pool, tmp_path)


def check_killed_worker(pool: ResourcePool, tmp_path: object, **kwargs: Any) -> None:
    """kwargs: of `start`."""
    group = start(pool, tmp_path, **kwargs)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank 1 .*process {group.places[1].pid} died") as caught:
        group.role("faulty").die(bad=1).get()
    assert caught.value.rank == 1 and time.monotonic() - begun < 20
    assert "last words" in str(caught.value) and "50%" not in str(caught.value)


def test_a_missed_deadline_names_verb_and_rank_and_shows_its_stack(pool: ResourcePool, tmp_path: object) -> None:
    group = start(pool, tmp_path, phase_timeout=3.0)
    group._watch.places[0] = replace(group.places[0], node_id="ab" * 28)  # a node that is lost
    assert "(no stack: " in group._watch._stacks([0])[0]
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"faulty.stall took longer than 3.0 s; no answer from ranks 1 ") as caught:
        group.role("faulty").stall(bad=1).get()
    assert time.monotonic() - begun < 15
    assert "roles.py" in str(caught.value) and "in stall" in str(caught.value)


def test_a_log_folder_that_cannot_be_made_is_the_cause(tmp_path: Path) -> None:
    """Of every later call too, which would otherwise fail by what is missing."""
    (tmp_path / "file").touch()
    process = RankProcess()
    told = process.configure(1, {}, str(tmp_path / "file" / "logs" / "rank1.log")).failure
    assert (told.rank, told.verb, told.types[0]) == (1, "configure", "NotADirectoryError")
    assert process.call("actor", "update_actor", [], {}, keep=True).failure == told


def test_a_role_that_cannot_be_built_keeps_its_error(pool: ResourcePool, tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="faulty rank 1") as caught:
        start(pool, tmp_path, broken=1)
    assert caught.value.problems == ["first problem", "second problem"] and exit_code(caught.value) == 2
