"""Trains a model: SFT or reinforcement learning, on one machine or many.

    torchrun --nproc-per-node=1 launch/train.py actor.model.path=FOLDER data.train_files=prompts.jsonl reward.function=my_rewards:score

Exit code 0: every step was done. 2: settings, data or model cannot work (nothing was started). 1: the run failed. 130: Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from hybridflow.config.help import help_text
from hybridflow.config.load import LoadedConfig, load_config
from hybridflow.errors import HybridFlowError


def main(arguments: list[str]) -> int:
    try:
        loaded = load_config(arguments)
        if loaded.help:
            print(help_text("torchrun --nproc-per-node=1 launch/train.py", __doc__.splitlines()[0]), end="")
            return 0
        if loaded.print_config:
            print(loaded.text, end="")
            return 0
        return train(loaded)
    except HybridFlowError as error:
        text = "\n".join(f"✗ {line}" for line in str(error).splitlines())
        print(text, file=sys.stderr, flush=True)
        tell_torchrun(text)
        return error.EXIT_CODE


def tell_torchrun(text: str) -> None:
    """torchrun ends with a report of its own, far below the error: this puts the error into it."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        Path(file).write_text(json.dumps({"message": text, "timestamp": int(time.time())}), encoding="utf-8")


def train(loaded: LoadedConfig) -> int:
    """The run, in the driver; the job's other processes wait in job_session and leave with the driver's exit code."""
    from hybridflow.cluster.bootstrap import ending_signal, job_session  # Ray and torch load slowly: settings are read before
    from hybridflow.cluster.failure import exit_code
    from hybridflow.observe.logs import setup_logging
    from hybridflow.trainer.run import reason, run

    setup_logging()
    try:
        with job_session(loaded.config.cluster) as job:
            run(loaded, job)
    except (KeyboardInterrupt, SystemExit) as error:  # where it happened to be says nothing
        if isinstance(error, KeyboardInterrupt) or ending_signal():
            print(f"✗ {reason(error)}", file=sys.stderr, flush=True)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
