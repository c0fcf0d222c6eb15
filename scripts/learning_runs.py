"""Every algorithm of reinforcement learning on the addition task, with real Megatron and vLLM ranks: does the held-out reward rise?

    python scripts/learning_runs.py [--only grpo rloo ...] [--steps 24] [--ranks 2] [--out runs/learning] [--results FILE]

One warm start by SFT, shared by all; then one run per algorithm from it, with the settings of configs/algorithm/NAME.yaml and
what EXTRA adds. The table of results is written to --results (docs/results/algorithms.md holds the last one). Exit code 1 if a
run fails or does not raise the held-out reward by MIN_GAIN. For a quiet machine: about a minute and a half for each algorithm on
two cores.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hybridflow.observe.metrics import read_metrics
from hybridflow.observe.names import VAL_REWARD
from hybridflow.observe.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
MIN_GAIN = 0.1  # of the held-out mean reward, which is the share of right sums

# What an algorithm needs beside its own settings on this task: a few hundred short responses a step, four updates each.
EXTRA: dict[str, list[str]] = {
    "ppo": [],
    "grpo": [],
    "rloo": [],
    "remax": [],
    "reinforce_pp": ["algorithm.kl_coef=0.001"],  # per-token KL in the reward
    "dapo": ["algorithm.overlong_buffer=1", "algorithm.overlong_penalty=0.2"],
    "gspo": ["algorithm.clip_low=0.1", "algorithm.clip_high=0.15"],  # the paper's 3e-4 is for steps a thousand times smaller
}
EXPERIMENT = {"ppo": "addition_ppo"}  # the others': addition_grpo


@dataclass(frozen=True)
class Outcome:
    """One run: seconds of the whole program, held-out reward before and after, training reward of the last step."""

    name: str
    extra: str
    seconds: float
    first: float
    last: float
    train: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(EXTRA), choices=list(EXTRA), help="algorithms (none: the warm start alone)")
    parser.add_argument("--steps", type=int, default=24, help="rollouts of each run")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes: TP2 in training, TP1 in generation")
    parser.add_argument("--out", type=Path, default=Path("runs/learning"), help="folder of data, warm start and runs")
    parser.add_argument("--results", type=Path, default=None, help="Markdown file to write the table to")
    arguments = parser.parse_args()
    warm = warm_start(arguments.out, arguments.ranks)
    outcomes, bad = [], []
    for name in arguments.only:
        outcome = run(name, arguments, warm)
        if outcome is None or outcome.last < outcome.first + MIN_GAIN:
            bad.append(name)
        outcomes += [outcome] if outcome else []
        if arguments.results is not None:
            arguments.results.write_text(report(outcomes, arguments))
    print(report(outcomes, arguments))
    if bad:
        sys.exit(f"failed, or held-out reward did not rise by {MIN_GAIN}: {', '.join(bad)}")


def warm_start(out: Path, ranks: int) -> Path:
    """The checkpoint all runs start from; made once."""
    checkpoint = RunFolder(out / "warm").checkpoint
    if not checkpoint.exists():
        settings = ["trainer.steps=200", "trainer.val_interval=0", f"actor.model.path={out}/data/model"]
        prepare = [sys.executable, str(ROOT / "scripts/prepare_addition.py"), "--out", str(out / "data"), "--val", "256"]
        if launch(prepare) or launch(training("addition_sft", "warm", out, ranks, settings)):
            sys.exit("the warm start failed")
    return checkpoint


def run(name: str, arguments: argparse.Namespace, warm: Path) -> Outcome | None:
    """One algorithm's run; None if it failed."""
    settings = [f"algorithm={name}", f"actor.model.path={warm}", f"trainer.steps={arguments.steps}", "trainer.val_interval=0",
                "trainer.save_final=false", "rollout.max_num_seqs=256", "actor.optimizer.warmup_steps=10", *EXTRA[name]]
    start = time.perf_counter()
    if launch(training(EXPERIMENT.get(name, "addition_grpo"), name, arguments.out, arguments.ranks, settings)):
        return None
    seconds = time.perf_counter() - start
    rows = read_metrics(RunFolder(arguments.out / name).metrics)
    held_out = [row[VAL_REWARD] for row in rows if VAL_REWARD in row]
    train_reward = [row["reward/mean"] for row in rows if "reward/mean" in row][-1]
    return Outcome(name, " ".join(EXTRA[name]), seconds, held_out[0], held_out[-1], train_reward)


def training(experiment: str, name: str, out: Path, ranks: int, settings: list[str]) -> list[str]:
    """The command of one run."""
    return [sys.executable, str(ROOT / "launch/train.py"), f"experiment={experiment}", f"cluster.ranks_per_node={ranks}",
            f"data.train_files=[{out}/data/train.parquet]", f"data.val_files=[{out}/data/val.parquet]", f"trainer.name={name}",
            f"trainer.output_dir={out}", "trainer.overwrite=true", *settings]


def launch(command: list[str]) -> int:
    """The exit code of a command."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def report(outcomes: list[Outcome], arguments: argparse.Namespace) -> str:
    rows = [f"| {o.name} | {o.first:.1%} | {o.last:.1%} | {o.train:.1%} | {o.seconds:.0f} | {o.extra} |" for o in outcomes]
    day, cores = datetime.date.today(), os.cpu_count()
    command = ["scripts/learning_runs.py", "--only", *arguments.only, f"--steps {arguments.steps} --ranks {arguments.ranks}"]
    return "\n".join([
        "# Learning runs: two-number addition", "",
        f"{day}, {arguments.ranks} CPU ranks on {cores} cores ({platform.machine()}), TP2 in training and TP1 x DP{arguments.ranks} in",
        f"generation, {arguments.steps} rollouts of 64 prompts x 8 responses (PPO: 128 x 4), four optimizer steps each, all from one warm",
        "start (SFT). Held-out: share of 256 unseen sums that greedy decoding gets right.", "",
        "    python " + " ".join(command), "",
        "| algorithm | held-out before | held-out after | last rollout (sampled) | seconds, start-up included | beside its own settings |",
        "|---|---|---|---|---|---|", *rows, "",
    ])


if __name__ == "__main__":
    main()
