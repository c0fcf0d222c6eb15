"""The scalar head of critics and reward models: read from a sequence-classification checkpoint, or new on a language model.

Hugging Face stores it as `score.weight` [1, hidden], without a bias (*ForSequenceClassification with num_labels=1).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist

from hybridflow.models.checkpoint import load_shards
from hybridflow.models.shards import ShardParameter
from hybridflow.models.tensor_files import describe
from hybridflow.models.weight_map import WeightMap

SCORE = "score.weight"
SOURCE_HEAD = "lm_head.weight"  # of a language model; a scalar head has no use for it

logger = logging.getLogger(__name__)


def load_scalar_model(
    path: str, weights: WeightMap, parameters: Mapping[str, ShardParameter], into: Mapping[str, torch.Tensor], *, std: float, seed: int
) -> None:
    """load_shards for a model with a scalar head. A folder without `score.weight` is a language model: its head is ignored and the
    score starts from a normal distribution (mean 0, deviation `std`) that depends on `seed` alone, whatever the layout.

    Raises ModelError as load_shards does.
    """
    expected = dict(weights.logical)
    new = SCORE not in describe(path)
    if new:
        log = logger.warning if not dist.is_initialized() or dist.get_rank() == 0 else logger.debug
        log("%s has no %s: the scalar head starts from random values (seed %d)", path, SCORE, seed)
        del expected[SCORE]
        parameters = {name: parameter for name, parameter in parameters.items() if name != SCORE}
    rest = {name: tensor for name, tensor in into.items() if name != SCORE or not new}
    load_shards(path, parameters, rest, expected, ignored=(SOURCE_HEAD,))
    if new and SCORE in into:
        into[SCORE].copy_(initial_score(weights.logical[SCORE], std, seed))


def initial_score(shape: tuple[int, ...], std: float, seed: int) -> torch.Tensor:
    """A new head's weights, float32 [1, hidden]."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std
