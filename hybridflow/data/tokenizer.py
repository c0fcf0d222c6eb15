"""Loading of a model's tokenizer, with another chat template where one is configured."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridflow.config.schema import ModelConfig
from hybridflow.errors import DataError, ModelError


def load_tokenizer(model: ModelConfig, key: str = "actor.model") -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer_path` (else `model.path`), with `model.chat_template` put in when set. key: where the
    settings `model` stand.

    Raises ModelError when no tokenizer can be loaded from there, DataError when the template file is missing.
    """
    path = model.tokenizer_path or model.path
    if not Path(path).is_dir():  # a name would be looked up on the network
        raise ModelError(f"the tokenizer folder {path} does not exist; correct {key}.path or {key}.tokenizer_path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # damaged files end in whatever error the reader of their format meets
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(f"no tokenizer in {path} that can be read ({reason}); copy its files again, or set {key}.tokenizer_path to a "
                         "folder that has one") from error
    if model.chat_template is not None:
        try:
            tokenizer.chat_template = Path(model.chat_template).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{key}.chat_template={model.chat_template} cannot be read: {error}") from error
    return tokenizer
