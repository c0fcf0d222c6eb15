"""The console: aligned plain lines in a pipe, a live table on a terminal, warnings once."""

import io
import logging
import math
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from hybridflow.observe.console import PlainConsole, make_console
from hybridflow.observe.logs import setup_logging
from hybridflow.observe.rollouts import Rollout
from hybridflow.observe.table import COLUMNS, RL_COLUMNS, cells, thin


def metrics(step):
    return {
        "reward/mean": step / 100, "kl": 1e-5 * step, "entropy": 1.25, "response_length/mean": 120.0, "tokens_per_second": 12345.6,
        "log_prob_gap/mean": 3e-7, "seconds/generate": 1.5, "seconds/update": 2.25, "seconds/other": 0.25, "seconds/total": 4.0,
    }


def test_a_pipe_gets_plain_aligned_lines():
    stream = io.StringIO()
    console = make_console("prompts", 100, stream)
    console.start("GRPO", {"model": "tiny", "ranks": 4})
    console.step(0, {"val/reward": 0.25})
    for step in range(1, 46):
        console.step(step, metrics(step))
    lines = stream.getvalue().splitlines()
    assert lines[:3] == ["GRPO", "  model  tiny", "  ranks  4"]
    headers = [index for index, line in enumerate(lines) if "reward" in line and "tokens/s" in line]
    assert headers == [3, 24, 45]  # again every 20 lines
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()
    row = lines[-1]
    assert row.split()[:5] == ["45/100", "0.450", "-", "4.5e-04", "1.250"]
    assert row.endswith("4.00  generate 1.50  update 2.25  other 0.25")
    for title in ("step", "reward", "val", "kl", "entropy", "length", "tokens/s", "gap", "seconds"):
        end = re.search(rf"\b{re.escape(title)}(?!\S)", lines[headers[0]]).end()
        assert row[end - 1] != " " and row[end] == " ", f"column {title} is not under its header"


def test_sft_columns():
    stream = io.StringIO()
    console = PlainConsole("responses", None, stream)
    console.step(1, {"loss": 2.5, "tokens_per_second": 1000.0, "grad_norm": math.nan})
    header, row = stream.getvalue().splitlines()
    assert header.split() == ["step", "loss", "val", "loss", "grad", "lr", "tokens/s", "seconds"]
    assert row.split() == ["1", "2.5000", "-", "nan", "-", "1,000", "-"]


@pytest.mark.parametrize("kind, special", [("pairs", "0.031"), ("labels", "1.500")])
def test_preference_columns(kind, special):
    """Every column of a kind is filled from its metrics, under a title that fits."""
    assert all(len(column.title) <= column.width for column in COLUMNS[kind])
    stream = io.StringIO()
    console = PlainConsole(kind, None, stream)
    console.step(1, {"preference/accuracy": 0.75, "preference/margin": 0.031, "preference/reference_point": 1.5, "loss": 0.5, "lr": 0.1})
    console.step(1, {"val/accuracy": 0.5, "val/loss": 0.625})
    _, first, second = stream.getvalue().splitlines()
    assert first.split()[:6] == ["1", "0.5000", "-", "0.750", "-", f"{special}0"]
    assert second.split()[:6] == ["1", "-", "0.6250", "-", "0.500", "-"]


def test_a_warning_comes_once_and_is_counted():
    stream = io.StringIO()
    console = PlainConsole("prompts", 10, stream)
    for step in range(4):
        console.warn(f"gap {step} is large", key="gap")
    console.warn("other")
    console.finish("done", {"curves": "x.png"})
    text = stream.getvalue()
    assert text.count("warning: gap") == 1 and "warning: gap 0 is large" in text
    assert "warning repeated 3 more times: gap" in text
    assert text.count("other") == 1
    assert text.endswith("  curves  x.png\n")


def test_second_call_for_a_step_joins_its_row():
    stream = io.StringIO()
    console = PlainConsole("prompts", 2, stream)
    console.step(1, metrics(1))
    console.step(2, metrics(2))
    console.step(2, {"val/reward": 0.75})
    console.finish("done", {})
    final = stream.getvalue().split("done\n")[1].splitlines()
    assert len(final) == 3  # header and two steps
    assert final[-1].split()[:3] == ["2/2", "0.020", "0.750"]


def test_samples_are_shown():
    stream = io.StringIO()
    PlainConsole("prompts", 1, stream).samples("before:", [Rollout(0, 1, 0, "1+1=", "2", 1.0, "stop")])
    assert stream.getvalue().splitlines()[0] == "before:" and "1+1=" in stream.getvalue()


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-300, 1e30, math.nan, math.inf, -math.inf])
def test_any_number_has_a_cell(value):
    assert all(text and text != "-" for text in cells(RL_COLUMNS, {column.metric: value for column in RL_COLUMNS}))


@pytest.mark.parametrize("count", [0, 1, 2, 11, 12, 13, 14, 25, 100, 1001])
def test_thinning_keeps_ends_order_and_limit(count):
    rows = [{"step": step} | ({"val/reward": 1.0} if step % 10 == 0 else {}) for step in range(count)]
    steps = [row["step"] for row in thin(rows, 12)]
    assert steps == sorted(set(steps)) and len(steps) == min(count, 12)
    assert not rows or (steps[0], steps[-1]) == (0, count - 1)


def test_thinning_prefers_validated_steps():
    rows = [{"step": step} | ({"val/reward": 1.0} if step % 10 == 5 else {}) for step in range(100)]
    inner = [row["step"] for row in thin(rows, 12)][1:-1]
    assert sum(step % 10 == 5 for step in inner) >= 8


LIVE_PROGRAM = """
import sys, time
from hybridflow.observe.console import make_console
from hybridflow.observe.logs import setup_logging
import logging
setup_logging()
console = make_console("prompts", 3)
print(type(console).__name__)
console.start("GRPO", {"model": "tiny"})
for step in (1, 2, 3):
    console.phase("generate")
    time.sleep(0.1)
    console.phase("")
    console.step(step, {"reward/mean": step / 4, "seconds/generate": 0.1, "seconds/total": 0.1})
    console.warn("look here", key="k")
logging.getLogger("hybridflow.x").info("a log line")
console.finish("finished well", {"curves": "c.png"})
"""


def run_on_terminal(term):
    """Output of LIVE_PROGRAM on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": term, "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen([sys.executable, "-c", LIVE_PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                block = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not block:
                break
            output += block
        elif process.poll() is not None:
            break
    os.close(ours)
    assert process.wait(30) == 0, output.decode()
    return output.decode()


def test_live_table_on_a_terminal():
    text = run_on_terminal("xterm-256color")
    assert "LiveConsole" in text
    assert "step 3/3" in text and "left" in text and "generate" in text
    assert "\x1b[?25h" in text  # the cursor is given back
    assert text.count("look here") == 1
    assert "a log line" in text
    final = text[text.index("finished well") :]
    assert "0.750" in final and "c.png" in final


def test_dumb_terminal_gets_plain_lines():
    text = run_on_terminal("dumb")
    assert "PlainConsole" in text and "\x1b" not in text


def test_logging_has_one_format_and_names_the_rank(capsys):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        setup_logging(rank=3, role="actor")
        setup_logging(rank=3, role="actor")  # twice: still one line
        logging.getLogger("hybridflow.engine").info("loaded %d tensors", 5)
        logging.getLogger("somebody").info("chatter")
        lines = capsys.readouterr().err.splitlines()
    finally:
        for handler in [h for h in root.handlers if h not in before]:
            root.removeHandler(handler)
        root.setLevel(level)
        logging.getLogger("hybridflow").setLevel(logging.NOTSET)
    assert len(lines) == 1
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO \[actor rank 3\] hybridflow\.engine: loaded 5 tensors", lines[0])
