"""A character-level Hugging Face tokenizer made on the spot, for models that are made on the spot (demo, tests)."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, BOS, UNKNOWN = "<pad>", "<eos>", "<bos>", "<unk>"


def char_tokenizer(characters: str, *, vocab_size: int | None = None, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per ASCII character; ids: 0 pad, 1 eos, 2 bos, 3 unknown, then `characters` in their order.

    vocab_size: fills the rest with unused `<extra_i>` tokens. No BOS is added when encoding. Raises ValueError when the
    characters repeat, are not ASCII, or do not fit.

    Technically byte-level BPE without merges: for a Qwen2 checkpoint AutoTokenizer ignores the stored tokenizer class
    and rebuilds byte-level BPE from the vocabulary, so anything else would lose the space and the line break there.
    """
    if not characters.isascii():
        raise ValueError(f"only ASCII characters have one byte: {characters!r}")
    tokens = [PAD, EOS, BOS, UNKNOWN, *(_byte_symbol(character) for character in characters)]
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"characters repeat in {characters!r}")
    size = vocab_size or len(tokens)
    if size < len(tokens):
        raise ValueError(f"{len(tokens)} tokens do not fit vocab_size={size}")
    tokens += [f"<extra_{i}>" for i in range(size - len(tokens))]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, bos_token=BOS, unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False, chat_template=chat_template,
    )


def _byte_symbol(character: str) -> str:
    """How byte-level BPE spells a character (a space is `Ġ`, a line break `Ċ`)."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)[0][0]
