"""Mistral: Llama's layer without biases; older models attend through a sliding window.

Up to the window such attention is full attention, which is what the training engine computes: `ModelFacts.longest_sequence` is then
the window, and longer sequences are refused.
"""

from __future__ import annotations

from hybridflow.models.families.dense import Family, decoder_layer
from hybridflow.models.settings import dense_settings

FAMILY = Family("mistral", dense_settings, decoder_layer)
