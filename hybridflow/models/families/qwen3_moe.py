"""Qwen3-MoE: Qwen3's attention; in most layers a choice of experts."""

from __future__ import annotations

from hybridflow.models.families import qwen3
from hybridflow.models.families.dense import Family
from hybridflow.models.families.moe import ExpertNames, expert_layer

FAMILY = Family("qwen3_moe", qwen3.settings, expert_layer(ExpertNames()))
