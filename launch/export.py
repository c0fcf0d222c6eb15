"""Exports the weights of a run, or converts a model folder, to a Hugging Face model that is verified before it takes its name.

    python launch/export.py --model runs/my-run --to my-model
    python launch/export.py --model FOLDER --to FOLDER --dtype float16 --file_gib 2

Names, shapes and dtypes of all tensors are checked against the model's table and against the model it was trained from, then one
forward pass of Hugging Face on the new files against one on the old. Exit code 0: all of that holds and the folder is complete.
2: the input cannot be exported, everything wrong with it is listed, and nothing was written. 1: it failed on the way.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybridflow.errors import HybridFlowError, ModelError

DTYPES = ("bfloat16", "float16", "float32")


def arguments_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a run's folder (its last weights are taken) or a Hugging Face model folder")
    parser.add_argument("--to", required=True, help="the folder to write; it must not exist unless --replace is given")
    parser.add_argument("--source", help="the model it was trained from; a run's is known from its config.yaml")
    parser.add_argument("--dtype", choices=DTYPES, help="of the new files; without it, the dtype stays")
    parser.add_argument("--file_gib", type=float, default=5.0, help="largest size of one file in GiB (default 5)")
    parser.add_argument("--replace", action="store_true", help="an existing model folder is replaced once its successor is complete")
    return parser.parse_args(arguments)


def model_of(given: str) -> tuple[str, str | None]:
    """(model folder, the folder it was trained from if known) for a run's folder or a model folder."""
    from hybridflow.observe.run_folder import RunFolder

    if not (Path(given) / "status.json").is_file():
        return given, None
    run = RunFolder.open(given)
    status = run.status()
    if not run.checkpoint.is_dir():
        reason = f": {status.reason}" if status.reason else ""
        raise ModelError(f"the run {given} has no weights yet (it is {status.state} at step {status.step}{reason}); "
                         "they are written when its last step is done, unless trainer.save_final=false")
    return str(run.checkpoint), _trained_from(run.config)


def _trained_from(config: Path) -> str | None:
    """actor.model.path of a run, where that folder is on this machine."""
    from omegaconf import OmegaConf

    path = OmegaConf.select(OmegaConf.load(config), "actor.model.path")
    if path and Path(path).is_dir():
        return str(path)
    print(f"note: there is no {path}, from which the run started, in {Path.cwd()}; the weights are checked without it (or give --source)")
    return None


def export(options: argparse.Namespace) -> str:
    """Does it; one line on what was written."""
    model, known = model_of(options.model)
    if not 0 < options.file_gib < float("inf"):
        raise ModelError(f"--file_gib {options.file_gib:g}: must be a finite number above 0")
    import torch

    from hybridflow.models.convert import convert

    dtype = getattr(torch, options.dtype) if options.dtype else None
    done = convert(model, options.to, source=options.source or known, dtype=dtype, file_bytes=int(options.file_gib * 2**30),
                   replace=options.replace)
    checked = f"one forward pass is equal; rounding moved logits by up to {done.logits_moved:.3g}" if done.logits_moved else (
        "one forward pass is equal to the bit")
    return (f"✓ {options.to}: {done.tensors} tensors, {done.size / 2**20:,.1f} MiB of {str(done.dtype).removeprefix('torch.')} in "
            f"{done.files} file{'s' if done.files > 1 else ''}; names and shapes are the model's, {checked}")


def main(arguments: list[str]) -> int:
    try:
        print(export(arguments_of(arguments)))
    except HybridFlowError as error:
        print("\n".join(f"✗ {line}" for line in str(error).splitlines()), file=sys.stderr)
        return error.EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
