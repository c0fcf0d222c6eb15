"""The demo's model and data, made on the spot without a download.

    python scripts/prepare_addition.py --out DIR

DIR/model: a small Llama with random weights and a character-level tokenizer (16 tokens). DIR/train.parquet,
DIR/val.parquet: sums of two numbers from 0 to 99. A prompt is `37+45=` (two digits each), its response the sum with its
digits from the units up, `28`, which is the order in which one adds by hand (hybridflow/rewards/tasks/addition.py).
The column `answer` holds the sum as a number, `response` the text that supervised training imitates. A pair of numbers
stands in one of the two files only, and so does the same pair the other way round.

The same sums as preferences: DIR/train_pairs.parquet and val_pairs.parquet (`chosen`: the sum, `rejected`: the sum with one
digit wrong; DPO, reward model) and DIR/train_labels.parquet and val_labels.parquet (`response`: one of the two, `label`: is it
the sum; KTO).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.data.char_tokenizer import char_tokenizer
from hybridflow.rewards.tasks.addition import spell

CHARACTERS = "0123456789+="
NUMBERS = range(100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--val", type=int, default=512, help="held-out sums")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the weights")
    arguments = parser.parse_args()
    if not 0 < arguments.val < len(NUMBERS) ** 2 // 2:
        parser.error(f"--val {arguments.val}: 1 to {len(NUMBERS) ** 2 // 2 - 1}, so that both files hold sums")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {arguments.out}: the folder cannot be made ({error})")
    write_model(arguments.out / "model", arguments.seed)
    train, val = split(arguments.val, arguments.seed)
    draw = random.Random(arguments.seed)
    for name, pairs in (("train", train), ("val", val)):
        for kind, rows in (("", sums(pairs)), ("_pairs", preferences(pairs, draw)), ("_labels", labelled(pairs, draw))):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), arguments.out / f"{name}{kind}.parquet")
    print(f"model, train.parquet ({len(train)} sums), val.parquet ({len(val)} sums) and both as pairs and labels are in {arguments.out}")


def write_model(path: Path, seed: int) -> None:
    """2 layers, width 128, 4 heads and 4 key-value heads (TP 1, 2, 4; PP 1, 2), tied embeddings: 0.33 million parameters."""
    tokenizer = char_tokenizer(CHARACTERS)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def split(held_out: int, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Training and held-out pairs. (a, b) and (b, a) stand on the same side, so that no held-out sum was seen swapped."""
    unordered = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b]
    random.Random(seed).shuffle(unordered)
    val: list[tuple[int, int]] = []
    train: list[tuple[int, int]] = []
    for a, b in unordered:
        side = val if len(val) < held_out else train
        side += [(a, b)] if a == b else [(a, b), (b, a)]
    return train, val[:held_out]


def sums(pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows for supervised training and rewards."""
    return [{"prompt": prompt(a, b), "response": spell(a + b), "answer": a + b} for a, b in pairs]


def preferences(pairs: list[tuple[int, int]], draw: random.Random) -> list[dict[str, Any]]:
    """Rows for DPO and reward models: the sum is better than a wrong one."""
    return [{"prompt": prompt(a, b), "chosen": spell(a + b), "rejected": spell(wrong(a + b, draw))} for a, b in pairs]


def labelled(pairs: list[tuple[int, int]], draw: random.Random) -> list[dict[str, Any]]:
    """Rows for KTO: about half of the responses are right."""
    rows = []
    for a, b in pairs:
        right = draw.random() < 0.5
        rows.append({"prompt": prompt(a, b), "response": spell(a + b if right else wrong(a + b, draw)), "label": right})
    return rows


def prompt(a: int, b: int) -> str:
    return f"{a:02d}+{b:02d}="


def wrong(number: int, draw: random.Random) -> int:
    """The number with one digit changed, as many digits long."""
    digits = str(number)
    place = draw.randrange(len(digits))
    others = [digit for digit in "0123456789" if digit != digits[place] and (digit != "0" or place > 0 or len(digits) == 1)]
    return int(digits[:place] + draw.choice(others) + digits[place + 1 :])


if __name__ == "__main__":
    main()
