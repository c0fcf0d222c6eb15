"""What a model folder is, from its config.json and the headers of its files."""

from __future__ import annotations

from hybridflow.errors import ModelError
from hybridflow.models.checkpoint import file_problems
from hybridflow.models.scalar_head import SCORE, SOURCE_HEAD
from hybridflow.models.settings import read_hf_config
from hybridflow.models.tensor_files import describe
from hybridflow.models.weight_map import WeightMap, weight_map


def inspect_model(path: str) -> WeightMap:
    """The weight map of a model folder, with the head that its files hold.

    Raises ModelError when its family cannot express the configuration, or listing every missing, misshaped, surplus or oddly typed
    tensor. No tensor is read, so that a run can be refused before it starts anything.
    """
    found = describe(path)
    scalar = SCORE in found
    weights = weight_map(read_hf_config(path), head="scalar" if scalar else "lm")
    problems = file_problems(found, {}, weights.logical, (SOURCE_HEAD,) if scalar else ())
    if problems:
        raise ModelError(f"{path} does not fit the model:\n  " + "\n  ".join(problems))
    return weights
