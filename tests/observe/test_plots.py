"""Curves: the expected panels, a picture with something in it, a page that needs no network."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from hybridflow.errors import DataError
from hybridflow.observe.metrics import MetricsWriter
from hybridflow.observe.panels import moving_mean, panels
from hybridflow.observe.plots import figure, write_curves
from hybridflow.observe.run_folder import RunFolder


def rl_rows(steps):
    rows = [{"step": 0, "val/reward": 0.3}]
    for step in range(1, steps + 1):
        rows.append({
            "step": step, "reward/mean": step / steps, "kl": 0.01 * step, "entropy": 1.0, "response_length/mean": 5.0 + step,
            "log_prob_gap/mean": 1e-6, "log_prob_gap/max": 1e-3, "grad_norm": math.nan if step == 2 else 1.0, "tokens_per_second": 100.0,
            "seconds/other": 0.5, "seconds/generate": 2.0, "seconds/update": 1.0, "seconds/total": 3.5,
        })
    return rows


def make_run(tmp_path, rows):
    run = RunFolder.create(tmp_path, "run <1>", True, "")
    with MetricsWriter(run.metrics) as writer:
        for row in rows:
            writer.write(row["step"], {name: value for name, value in row.items() if name != "step"})
    return run


def test_panels_of_reinforcement_learning():
    shown = panels(rl_rows(5))
    assert [panel.title for panel in shown] == [
        "Reward", "KL to the reference", "Entropy", "Response length", "Rollout-trainer log-prob gap", "Gradient norm", "Throughput",
        "Seconds by phase",
    ]
    reward, seconds = shown[0], shown[-1]
    assert [(s.label, s.x) for s in reward.series] == [("rollouts", [1, 2, 3, 4, 5]), ("validation", [0])]
    assert [s.label for s in seconds.series] == ["generate", "update", "other"]  # the remainder on top, no total
    assert [s.y[0] for s in seconds.series] == [2.0, 1.0, 0.5]
    assert shown[4].log and not reward.log


def test_panels_of_supervised_training_begin_with_the_loss():
    shown = panels([{"step": step, "loss": 1.0 / step, "val/reward": 0.5, "tokens_per_second": 5.0} for step in (1, 2)])
    assert [panel.title for panel in shown] == ["Loss", "Reward", "Throughput"]


def test_panels_of_preferences_show_the_order_of_held_out_pairs():
    measures = {"loss": 0.6, "preference/accuracy": 0.5, "preference/chosen": 1.0, "preference/rejected": 0.0}
    held_out = {"step": 0, "val/loss": 0.7, "val/accuracy": 0.5, "val/margin": 0.1}
    shown = panels([held_out, *({"step": step, **measures} for step in (1, 2))])
    assert [panel.title for panel in shown] == ["Loss", "Preferences in the right order", "Reward margin", "Rewards of preferences"]
    assert [(s.label, s.x) for s in shown[1].series] == [("training", [1, 2]), ("validation", [0])]


def test_moving_mean_is_centred_and_skips_nan():
    assert moving_mean([1.0, 2.0, 6.0, 4.0, 5.0], 3) == [1.0, 3.0, 4.0, 5.0, 5.0]
    assert moving_mean([1.0, math.nan, 3.0], 3) == [1.0, 2.0, 3.0]
    assert math.isnan(moving_mean([math.nan], 5)[0])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A run of six steps with its curves."""
    run = make_run(tmp_path_factory.mktemp("plots"), rl_rows(6))
    write_curves(run)
    return run


@pytest.mark.parametrize("steps", [1, 6, 80])  # bars and areas, few and smoothed points
def test_every_panel_is_drawn(steps):
    shown = panels(rl_rows(steps))
    drawing = figure(shown, "title")
    assert [axes.get_title(loc="left") for axes in drawing.axes] == [panel.title for panel in shown]
    assert all(axes.lines or axes.patches or axes.collections for axes in drawing.axes)


def test_png_has_colour_in_every_panel(drawn):
    pixels = imread(drawn.curves_png)
    assert pixels.shape[1] > 1000
    for band in np.array_split(pixels[..., :3], 4):  # four rows of two panels
        for part in np.array_split(band, 2, axis=1):
            assert ((part.max(axis=2) - part.min(axis=2)) > 0.3).sum() > 50


def test_html_is_whole_and_needs_nothing_else(drawn):
    page = drawn.curves_html
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"<script[^>]*\ssrc=", text) and not re.search(r"<link[^>]*\shref=", text)
    data = text[text.rindex("Plotly.newPlot") :]
    for panel in panels(rl_rows(6)):
        assert panel.title in data
    assert "run \\u003c1\\u003e" in data or "run &lt;1&gt;" in data or "run \\u0026lt;1" in data  # the name is text, not markup
    assert "NaN" not in data.split("Plotly.newPlot")[1].split("responsive")[0]
    assert page.stat().st_size < 6e6


def test_redrawing_replaces_whole_files(tmp_path):
    run = make_run(tmp_path, [{"step": 1, "loss": 1.0}])
    run.curves_png.write_text("old")
    write_curves(run)
    assert run.curves_png.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in run.root.iterdir() if p.name.startswith((".", "curves"))) == ["curves.html", "curves.png"]


def test_run_without_a_step_has_no_curves(tmp_path):
    run = make_run(tmp_path, [])
    with pytest.raises(DataError, match="no metric to draw"):
        write_curves(run)


def test_command_line(tmp_path):
    run = make_run(tmp_path, [{"step": 1, "loss": 1.0}])
    command = [sys.executable, "-m", "hybridflow.observe.plots"]
    good = subprocess.run([*command, str(run.root)], capture_output=True, text=True, timeout=120)
    assert good.returncode == 0, good.stderr
    assert good.stdout.split("\n")[:2] == [str(run.curves_png), str(run.curves_html)] and run.curves_png.is_file()
    bad = subprocess.run([*command, str(tmp_path / "nowhere")], capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2 and "is no run folder" in bad.stderr and "Traceback" not in bad.stderr
