"""First cause: pure rules, and real ranks that raise, die or stall."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.cluster.bootstrap import Cluster
from hybridflow.cluster.failure import Failure, describe_exception, exit_code, first_cause, worker_error
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.stacks import STOPPED, dump_stacks, stacks_of
from hybridflow.cluster.watch import losses_named
from hybridflow.cluster.worker import Place, RankProcess
from hybridflow.cluster.worker_group import WorkerGroup
from hybridflow.config.layout import Layout
from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import ConfigError, HybridFlowError, NumericsError, ReshardError, RewardError, WorkerError
from tests.cluster.roles import Faulty, Model


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
    """Rank 0 dies as torch's watchdog ends it, stacks of threads and all, before rank 1's death is seen, in the call that runs."""
    group = start(pool, tmp_path)
    group.role("faulty").abort_for(lost=1)
    with pytest.raises(WorkerError, match=f"rank 1 .*failed in abort_for: .*process {group.places[1].pid} died"):
        group.role("faulty").stall(bad=0).get()


def test_a_process_that_died_between_two_calls_is_named_by_what_misses_its_results(tmp_path: Path, ray_cluster: Cluster) -> None:
    """By a rank of another group, which cannot fetch them, and in the driver."""
    pools = [ResourcePool([1], "cpu"), ResourcePool([1], "cpu")]
    keeper, user = (WorkerGroup(pool, {name: (Model, {})}, layout=Layout(1), log_dir=str(tmp_path), start_timeout=120, wait=False)
                    for name, pool in zip(("keeper", "user"), pools))
    batch = Batch({"response_ids": Ragged.from_rows([[1, 2], [3]], dtype=torch.int64)})
    kept = keeper.role("keeper").log_prob(batch).get()
    assert user.role("user").whoami().first()["sum"] == 1
    os.kill(keeper.places[0].pid, signal.SIGKILL)
    time.sleep(1.0)  # until the loss of its results is known
    with pytest.raises(WorkerError, match="keeper rank 0 .*failed between two calls: WorkerDied") as caught:
        user.role("user").log_prob(kept).get()
    assert (caught.value.role, caught.value.rank) == ("keeper", 0)
    with pytest.raises(WorkerError, match="Ray failed in the driver: OwnerDiedError"), losses_named():
        kept.fetch()
    for pool in pools:
        pool.close()


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
    group = start(pool, tmp_path, phase_timeout=2.0)
    assert "(no stack: " in stacks_of({0: replace(group.places[0], node_id="ab" * 28)})[0]  # of a node that is lost
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"faulty.stall took longer than 2.0 s; no answer from ranks 1 ") as caught:
        group.role("faulty").stall(bad=1).get()
    assert time.monotonic() - begun < 15
    assert "roles.py" in str(caught.value) and "in stall" in str(caught.value)


@pytest.mark.slow  # its parts are the test above and the next
def test_a_stopped_rank_is_told_from_one_that_waits_for_it(pool: ResourcePool, tmp_path: Path) -> None:
    group = start(pool, tmp_path, phase_timeout=2.0)
    pid = group.places[1].pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"no answer from ranks 0 \(\S+, process \d+\), 1 \(\S+, process {pid}, stopped\)"):
        group.role("faulty").raise_among_collective(bad=2).get()


def test_a_stopped_process_is_not_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    begun = time.monotonic()
    assert dump_stacks({3: Place("", "", "", process.pid, (), 0, 0)}) == {3: STOPPED}
    assert time.monotonic() - begun < 0.5
    process.kill()
    process.wait()


def test_a_log_folder_that_cannot_be_made_is_the_cause(tmp_path: Path) -> None:
    """Of every later call too, which would otherwise fail by what is missing."""
    (tmp_path / "file").touch()
    process = RankProcess()
    told = process.configure(1, "actor", {}, str(tmp_path / "file" / "logs" / "rank1.log")).failure
    assert (told.rank, told.role, told.verb, told.types[0]) == (1, "actor", "configure", "NotADirectoryError")
    assert process.call("actor", "update_actor", [], {}, keep=True).failure == told


def test_a_role_that_cannot_be_built_keeps_its_error(pool: ResourcePool, tmp_path: object) -> None:
    with pytest.raises(ConfigError, match="faulty rank 1") as caught:
        start(pool, tmp_path, broken=1)
    assert caught.value.problems == ["first problem", "second problem"] and exit_code(caught.value) == 2
