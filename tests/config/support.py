"""What the configuration tests share: a valid configuration, and model facts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hybridflow.config import keys
from hybridflow.config.expert_facts import Experts, Routing
from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.render import value_at
from hybridflow.config.schema import Config

REQUIRED = ["actor.model.path=/model", "data.train_files=a.jsonl", "reward.function=rewards:score"]
SMOLLM2 = ModelFacts("/smollm2", "llama", layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152,
                     max_positions=8192, tied=True)
QWEN = ModelFacts("/qwen", "qwen2", layers=24, hidden=896, ffn=4864, heads=14, kv_heads=2, head_dim=64, vocab=151936,
                  max_positions=32768, tied=True, qkv_bias=True)
WIDE = ModelFacts("/wide", "llama", layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256,
                  max_positions=131072, tied=False)
MIXTRAL = replace(WIDE, path="/mixtral", family="mixtral", vocab=32000, experts=Experts(Routing(8, 2), 14336, (True,) * 32))
BIASED = replace(MIXTRAL, path="/biased", family="deepseek_v3", experts=Experts(Routing(8, 2, bias=True), 14336, (True,) * 32))
SMOLLM2_JSON = {
    "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 100000,
}


def config_of(**changes: object) -> Config:
    """A complete configuration with these changes; `rollout__n=3` sets rollout.n (quicker than composing files each time)."""
    config = Config()
    config.actor.model.path = "/model"
    config.data.train_files, config.reward.function = ["a.jsonl"], "rewards:score"
    for name, value in changes.items():
        *sections, last = name.split("__")
        section: object = config
        for part in sections:
            section = getattr(section, part)
        getattr(section, last)  # a misspelt name fails here
        setattr(section, last, value)
    return followed(config)


def followed(config: Config) -> Config:
    """The configuration with every value that follows another (schema.like) filled in, as loading does it."""
    for key in keys.leaves():
        value = value_at(config, key)
        while isinstance(value, str) and value.startswith("${"):
            value = value_at(config, value[2:-1])
        section, _, last = key.rpartition(".")
        setattr(value_at(config, section) if section else config, last, value)
    return config


def write_model(folder: Path, **changes: object) -> Path:
    """A model folder as far as the checks look: SmolLM2's config.json with changes, empty weights, a tokenizer file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMOLLM2_JSON | changes))
    (folder / "model.safetensors").touch()
    (folder / "tokenizer.json").touch()
    return folder
