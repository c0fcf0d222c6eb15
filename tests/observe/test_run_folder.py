"""The run folder: what is in it, what is refused, and that its status is never half written."""

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time

import pytest

from hybridflow.config.file_rules import PARTIAL
from hybridflow.errors import ConfigError, DataError
from hybridflow.observe.run_folder import RunFolder, write_atomic


def make(tmp_path, overwrite=False, name="first"):
    return RunFolder.create(tmp_path / "runs", name, overwrite, "trainer:\n  seed: 7\n")


def test_created_folder_holds_config_and_running_status(tmp_path):
    run = make(tmp_path)
    assert run.root == tmp_path / "runs" / "first"
    assert run.config.read_text() == "trainer:\n  seed: 7\n"
    assert run.rollouts.is_dir()
    status = json.loads(run.status_file.read_text())
    assert (status["state"], status["step"], status["pid"]) == ("running", 0, os.getpid())


def test_a_folder_on_a_full_disk_is_refused(tmp_path):
    """A limit on the size of files stands for the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"runs/first cannot be written \(.*File too large.*trainer.output_dir"):
            make(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_life_of_a_status(tmp_path):
    run = make(tmp_path)
    run.progress(3)
    assert (run.status().state, run.status().step) == ("running", 3)
    run.finish(4)
    assert (run.status().state, run.status().step, run.status().reason) == ("finished", 4, "")
    failed = make(tmp_path, name="second")
    failed.progress(2)
    partial = failed.root / PARTIAL.format("checkpoint")
    partial.mkdir()
    failed.fail("NumericsError: loss is NaN")
    assert not partial.exists()
    status = RunFolder.open(failed.root).status()
    assert (status.state, status.step, status.reason) == ("failed", 2, "NumericsError: loss is NaN")
    assert status.updated >= status.started > 0


def test_folder_with_content_needs_overwrite(tmp_path):
    make(tmp_path).finish(1)
    with pytest.raises(ConfigError, match=r"trainer\.name.*trainer\.overwrite=true"):
        make(tmp_path)


def test_empty_folder_is_used(tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    assert make(tmp_path).status().state == "running"


def test_overwrite_removes_the_old_run_and_nothing_else(tmp_path):
    old = make(tmp_path)
    (old.rollouts / "step_000001.jsonl").write_text("{}\n")
    old.checkpoint.mkdir()
    (old.checkpoint / "model.safetensors").write_text("old")
    for path in old.critics.values():  # what is left of one would end the next run, whose export overwrites nothing
        (path / "old").mkdir(parents=True)
    for path in (old.metrics, old.curves_png, old.curves_html, old.root / "notes.txt"):
        path.write_text("old")
    old.fail("killed")
    new = make(tmp_path, overwrite=True)
    assert sorted(path.name for path in new.root.iterdir()) == ["config.yaml", "logs", "notes.txt", "rollouts", "status.json"]
    assert list(new.rollouts.iterdir()) == []
    assert (new.status().state, new.status().reason) == ("running", "")


def test_overwrite_does_not_follow_a_link_out_of_the_folder(tmp_path):
    old = make(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_text("precious")
    old.checkpoint.symlink_to(elsewhere)
    old.finish(1)
    assert not make(tmp_path, overwrite=True).checkpoint.exists()
    assert (elsewhere / "model.safetensors").read_text() == "precious"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", "/abs"])
def test_name_that_leaves_the_output_folder_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"trainer\.name"):
        make(tmp_path, overwrite=True, name=name)


def test_output_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"trainer\.output_dir"):
        make(tmp_path)


def test_a_run_that_goes_on_cannot_be_overwritten(tmp_path):
    run = make(tmp_path)
    with pytest.raises(ConfigError, match="another run is writing"):
        make(tmp_path, overwrite=True)
    run.finish(1)
    make(tmp_path, overwrite=True)


def test_a_killed_run_leaves_no_lock(tmp_path):
    code = (
        "import os, sys; from hybridflow.observe.run_folder import RunFolder\n"
        "run = RunFolder.create(sys.argv[1], 'first', False, '')\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "runs")], timeout=60).returncode == -9
    assert RunFolder.open(tmp_path / "runs" / "first").status().state == "running"
    assert make(tmp_path, overwrite=True).status().pid == os.getpid()


def test_open_refuses_another_folder(tmp_path):
    with pytest.raises(DataError, match="no status.json"):
        RunFolder.open(tmp_path)


def _rewrite(path, stop):
    number = 0
    while not stop.is_set():
        number += 1
        write_atomic(path, json.dumps({"number": number, "filler": "x" * 200_000}))


def test_a_reader_never_sees_half_a_status(tmp_path):
    path = tmp_path / "status.json"
    write_atomic(path, json.dumps({"number": 0, "filler": ""}))
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    writer = context.Process(target=_rewrite, args=(path, stop))
    writer.start()
    try:
        seen, deadline = set(), time.monotonic() + 60
        while len(seen) < 20 and time.monotonic() < deadline:
            seen.add(json.loads(path.read_text())["number"])
    finally:
        stop.set()
        writer.join(30)
    assert len(seen) == 20  # it was rewritten while we read
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]
