"""Files and folders a run reads or writes: do they exist here? Their content is checked by the code that reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import MISSING

from hybridflow.config import keys
from hybridflow.config.roles import generates, has_role, model_roles
from hybridflow.config.schema import Config, ModelConfig

PARTIAL = ".{}.partial"  # a model folder while it is written, beside where it will be; {}: its name
STATE_FILE = "hybridflow/state.safetensors"  # in a checkpoint: what its run steered from step to step (trainer/state.py)


def file_problems(config: Config) -> list[str]:
    """Every missing weight file, tokenizer, template and data file, and a run folder that is in use. The model folders themselves
    are read_model_facts's."""
    problems = list(_model_problems("actor.model", config.actor.model))
    for role in model_roles(config)[1:]:
        if not role.reads_tokens:
            problems += list(_model_problems(f"{role.section}.model", role.settings.model))
        elif role.settings.model.path != config.actor.model.path:
            problems += list(_weight_problems(f"{role.section}.model.path", role.settings.model.path))
    if config.data.train_files != MISSING:
        problems += _data_problems("data.train_files", config.data.train_files)
    problems += _data_problems("data.val_files", config.data.val_files) + _data_problems("data.ptx_files", config.data.ptx_files)
    return problems + state_problems(config) + _run_folder_problems(config)


def state_warnings(config: Config) -> list[str]:
    """A state beside the starting weights that is not gone on with, although this run steers something."""
    path, steers = config.actor.model.path, config.algorithm.kl_target is not None or has_role(config, "cost")
    if config.trainer.state_path is not None or not generates(config) or not steers or not (Path(path) / STATE_FILE).is_file():
        return []
    return [f"trainer.state_path=null: controllers (KL coefficient, multiplier) start anew, as their settings say; "
            f"trainer.state_path={path} goes on with those of the run that wrote it."]


def state_problems(config: Config) -> list[str]:
    """Why there is no state of trainer.state_path to read; empty where it is not set."""
    path = config.trainer.state_path
    if path is None:
        return []
    if not generates(config):
        return [f"trainer.state_path={path} with algorithm.name={config.algorithm.name}: it steers nothing; use null."]
    if not (Path(path) / STATE_FILE).is_file():
        return [f"trainer.state_path={path}: no {STATE_FILE} in it; name the checkpoint of a run that generates, or use null."]
    return []


def _model_problems(key: str, model: ModelConfig) -> Iterator[str]:
    if not model.path:
        return  # required: said elsewhere
    yield from _weight_problems(f"{key}.path", model.path)
    name, path = (f"{key}.path", model.path) if model.tokenizer_path is None else (f"{key}.tokenizer_path", model.tokenizer_path)
    if model.tokenizer_path is not None and not Path(path).is_dir():
        yield f"{name}={path}: no such folder; it holds the tokenizer's files, or null takes those of {key}.path."
    elif Path(path).is_dir() and not any(any(Path(path).glob(pattern)) for pattern in ("tokenizer*", "vocab*")):
        yield f"{name}={path}: no tokenizer files in it (tokenizer.json, ...); add them or set {key}.tokenizer_path."
    if model.chat_template is not None and not Path(model.chat_template).is_file():
        yield f"{key}.chat_template={model.chat_template}: no such file; it is a Jinja template, or null takes the tokenizer's own."


def _weight_problems(key: str, path: str) -> Iterator[str]:
    if Path(path).is_dir() and not any(Path(path).glob("*.safetensors")):
        yield f"{key}={path}: no *.safetensors file in it; save the model with save_pretrained (safetensors is its format)."


def _data_problems(key: str, files: list[str]) -> list[str]:
    problems = []
    for name in files:
        path = Path(name)
        if not path.exists():
            near = keys.nearest(path.name, [entry.name for entry in path.parent.iterdir()], 0.7) if path.parent.is_dir() else None
            hint = f"; did you mean {path.parent / near}?" if near else ""
            problems.append(f"{key}: {name} does not exist{hint} (folder here: {Path.cwd()})")
    return problems


def _run_folder_problems(config: Config) -> list[str]:
    folder = Path(config.trainer.output_dir) / config.trainer.name
    if not config.trainer.name:
        return []  # refused by its own rule
    parent = next(place for place in (folder, *folder.parents) if place.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        return [f"trainer.output_dir={config.trainer.output_dir}: the run folder {folder} cannot be made, since {parent} is "
                f"{'not writable' if parent.is_dir() else 'a file'}; choose another folder."]
    if config.trainer.overwrite:
        return [f"{key}={path}: lies in {folder}, which trainer.overwrite=true clears before anything is read; choose another trainer.name."
                for key, path in _inputs(config) if Path(path).resolve().is_relative_to(folder.resolve())]
    if not folder.is_dir() or not any(folder.iterdir()):
        return []
    return [f"trainer.name={config.trainer.name}: {folder} holds an earlier run; choose another name or set trainer.overwrite=true."]


def _inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Every file and folder that the run reads, with its key."""
    for role in model_roles(config):
        model = role.settings.model
        paths = {name: getattr(model, name, None) for name in ("path", "tokenizer_path", "chat_template")}
        if role.section != "actor" and model.path == config.actor.model.path:
            del paths["path"]  # said already
        yield from ((f"{role.section}.model.{name}", path) for name, path in paths.items() if path not in (None, MISSING))
    if config.trainer.state_path is not None:
        yield "trainer.state_path", config.trainer.state_path
    data = config.data
    for key, files in (("train_files", data.train_files), ("val_files", data.val_files), ("ptx_files", data.ptx_files)):
        yield from ((f"data.{key}", name) for name in (files if files != MISSING else ()))
