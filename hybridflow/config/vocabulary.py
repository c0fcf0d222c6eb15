"""Vocabulary sizes as the engines pad and cut them: the one place that says so, for predictions and for the engines themselves."""

from __future__ import annotations

import math

CHUNK_LOGITS = 2**26  # float32 logits that the engine computes at a time (256 MiB); two such buffers exist in a backward pass
VLLM_MULTIPLE = 64  # DEFAULT_VOCAB_PADDING_SIZE of vLLM's VocabParallelEmbedding


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def vllm_vocab(vocab: int) -> int:
    """Rows of vLLM's embedding, which it then cuts over its ranks."""
    return round_up(vocab, VLLM_MULTIPLE)


def padded_vocab(vocab: int, tp: int) -> int:
    """Rows of Megatron's embedding: padded as vLLM pads them, and to what `tp` divides.

    Vocabularies of released models are multiples of 64 already, so this costs nothing; where it adds rows, both engines cut
    the vocabulary at the same places, and a rank's shard can serve both without a copy.
    """
    return round_up(vocab, math.lcm(VLLM_MULTIPLE, tp))
