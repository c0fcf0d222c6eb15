"""vLLM inside four ranks: right after every sync, repeatable, independent of replicas and batch limits, strict about versions.

Training is simulated by TP2 x PP2 shards of a checkpoint; generation runs at TP_g 1, 2 and 4 (with 2 KV heads: replicated).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybridflow.config.layout import Layout
from hybridflow.config.schema import RolloutConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.models.weight_map import weight_map
from tests.ranks import RankPool
from tests.rollout import on_ranks
from tests.tiny import make_tiny_model

LAYOUT = Layout(4, tp=2, pp=2)
EOS = 1
STOP = 40  # a token id the stop test ends on
RESPONSE = 24


@dataclass
class Ranks:
    """Four ranks with their engines by name, and two checkpoints per family."""

    pool: RankPool
    paths: dict[tuple[str, int], str]
    started: set[str] = field(default_factory=set)

    def start(self, name: str, family: str, tp_g: int, **settings: object) -> None:
        """Engine `name` on every rank, unless an earlier test has started it."""
        if name in self.started:
            return
        self.started.add(name)
        path = self.paths[family, 0]
        config = RolloutConfig(**{"kv_cache_gib": 0.03, "max_response_length": RESPONSE, "max_num_seqs": 64, **settings})
        self.pool.run(on_ranks.start, name, path, weight_map(AutoConfig.from_pretrained(path)), LAYOUT, tp_g, config)

    def sync(self, name: str, family: str, weights: int, version: int) -> None:
        self.pool.run(on_ranks.sync, name, self.paths[family, weights], version)

    def generate(self, name: str, prompts: Batch, split: bool = False, **options: object) -> list[Batch]:
        return self.pool.run(on_ranks.generate, name, prompts, split, {**OPTIONS, **options})


OPTIONS = {"step": 3, "n": 1, "temperature": 1.0, "seed": 5, "version": 0}


# Head size 32, the smallest that vLLM's CPU attention knows. Heads wider than hidden / heads, a sliding window that no sequence of the
# tests reaches, and scaled rotary embeddings where both engines must agree on what the numbers mean.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"hidden": 128, "tied": True},
    "qwen2": {"hidden": 128, "tied": False},
    "mistral": {"hidden": 64, "tied": False, "head_dim": 32, "sliding_window": 240, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e4, "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 6.5,
        "original_max_position_embeddings": 64}},
    "qwen3": {"hidden": 64, "tied": True, "head_dim": 32, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64}},
}  # fmt: skip


def _checkpoint(path: Path, family: str, seed: int) -> str:
    """Tiny, with matrices half as large as usual: logits stay of order one, so that float32 log-probs agree to 1e-5."""
    make_tiny_model(path, family, seed=seed, **FAMILIES[family])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.5)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("models")
    paths = {(family, seed): _checkpoint(folder / f"{family}{seed}", family, seed) for family in FAMILIES for seed in (0, 1)}
    with RankPool(4) as pool:
        yield Ranks(pool, paths)


@pytest.fixture
def single(ranks: Ranks) -> str:
    """An engine per rank, with the first checkpoint of the Llama family as version 0."""
    ranks.start("llama1", "llama", 1)
    ranks.sync("llama1", "llama", 0, 0)
    return "llama1"


def prompts_of(rows: list[list[int]], first_id: int = 100) -> Batch:
    return Batch({"prompt_id": torch.arange(first_id, first_id + len(rows)), "prompt_ids": Ragged.from_rows(rows, dtype=torch.int64)})


def random_prompts(lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(11)
    return prompts_of([torch.randint(4, 101, (n,), generator=generator).tolist() for n in lengths])


def rows_of(batches: list[Batch], column: str = "response_ids") -> dict[tuple[int, int], list]:
    """(prompt_id, sample_index) -> row."""
    return {(p, s): row.tolist() for batch in batches
            for p, s, row in zip(batch["prompt_id"].tolist(), batch["sample_index"].tolist(), batch[column].rows())}


@torch.no_grad()
def hf_greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    while ids.shape[1] < len(prompt) + RESPONSE and (ids.shape[1] == len(prompt) or ids[0, -1] != EOS):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt):].tolist()


@torch.no_grad()
def hf_log_probs(model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1].double() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def check_against_hf(model: PreTrainedModel, batch: Batch, temperature: float) -> None:
    columns = (batch[name].rows() for name in ("prompt_ids", "response_ids", "rollout_log_prob"))
    for prompt, response, log_prob in zip(*columns):
        if not temperature:
            assert response.tolist() == hf_greedy(model, prompt.tolist())
        wanted = hf_log_probs(model, prompt.tolist(), response.tolist(), temperature or 1.0)
        assert (log_prob - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize(("family", "tp_g"), [
    ("llama", 2), ("llama", 4), ("qwen2", 2),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [("llama", 1), ("qwen2", 1), ("qwen2", 4), ("mistral", 2), ("qwen3", 2)]),
])  # fmt: skip
def test_output_equals_hugging_face_after_every_sync(ranks: Ranks, family: str, tp_g: int) -> None:
    """Twice, with other weights and the same prompts, longer than a cache block: a stale prefix cache would show."""
    name = f"{family}{tp_g}"
    ranks.start(name, family, tp_g)
    prompts = random_prompts([3, 17, 150, 150])
    greedy = []
    for version in (0, 1):
        ranks.sync(name, family, version, version)
        model = AutoModelForCausalLM.from_pretrained(ranks.paths[family, version], dtype=torch.float32)
        for temperature in (0.0, 0.8):
            batches = ranks.generate(name, prompts, temperature=temperature, version=version)
            assert all(rows_of([b]) == rows_of([batches[0]]) for b in batches)
            check_against_hf(model, batches[0], temperature)
            greedy += [rows_of(batches)] if not temperature else []
    assert greedy[0] != greedy[1]


def test_samples_are_distinct_repeatable_and_independent_of_the_replicas(ranks: Ranks, single: str) -> None:
    """Two instances of one prompt, 4 samples each: 8 different responses, the same on 1 and 4 replicas; other seed or step: others."""
    prompts = prompts_of([[7, 8, 9]] * 8)
    together = rows_of(ranks.generate(single, prompts, n=4)[:1])
    assert len({tuple(row) for row in together.values()}) == 32
    assert rows_of(ranks.generate(single, prompts, split=True, n=4)) == together
    assert rows_of(ranks.generate(single, prompts.select([5, 2]), n=2)[:1]) == {
        (p, s): together[p, s] for p in (102, 105) for s in (0, 1)}
    for other in ({"seed": 6}, {"step": 4}):
        rows = rows_of(ranks.generate(single, prompts, n=4, **other)[:1])
        assert not any(rows[key] == together[key] for key in together)


def test_limits_of_the_batch_change_no_token(ranks: Ranks, single: str) -> None:
    ranks.start("narrow", "llama", 1, max_num_seqs=2, max_num_batched_tokens=32)  # less than a prompt
    ranks.sync("narrow", "llama", 0, 0)
    prompts = random_prompts([5, 40, 150, 9])
    wide, narrow = (ranks.generate(name, prompts, n=3)[0] for name in (single, "narrow"))
    assert rows_of([wide]) == rows_of([narrow])
    gap = (wide["rollout_log_prob"].values - narrow["rollout_log_prob"].values).abs().max()
    assert gap <= 1e-5


def test_stop_tokens_belong_to_the_response(ranks: Ranks, single: str) -> None:
    """eos and stop ids end a response, are its last token and have a log-prob; a truncated response has none."""
    ranks.start("stops", "llama", 1, stop_token_ids=[STOP])
    ranks.sync("stops", "llama", 0, 0)
    model = AutoModelForCausalLM.from_pretrained(ranks.paths["llama", 0], dtype=torch.float32)
    prompts = random_prompts([4] * 8)
    for name, ends in ((single, {EOS}), ("stops", {EOS, STOP})):
        batch = ranks.generate(name, prompts, n=16, temperature=2.0)[0]
        check_against_hf(model, batch, 2.0)
        seen = set()
        rows = (batch[column].rows() for column in ("response_ids", "rollout_log_prob"))
        for response, log_prob, reason in zip(*rows, batch["finish_reason"].tolist()):
            assert len(log_prob) == len(response) <= RESPONSE
            assert not ends & set(response[:-1].tolist())
            assert (reason == 0) == (int(response[-1]) in ends)
            assert reason == 0 or len(response) == RESPONSE
            seen.add(int(response[-1]) if reason == 0 else reason)
        assert seen == ends | ({1} - ends or {1})
        assert set(batch["finish_reason"].tolist()) == {0, 1}


def test_stop_strings_end_a_response(ranks: Ranks, single: str) -> None:
    """The response ends with the token that completes the string; without the string it would have gone on the same way."""
    ranks.start("strings", "llama", 1, stop=["7"], ignore_eos=True)
    ranks.sync("strings", "llama", 0, 0)
    seven = 4 + 7  # tests.tiny: digits follow four special tokens
    prompts = random_prompts([4] * 8)
    batch = ranks.generate("strings", prompts, n=8)[0]
    stopped = [row for row, reason in zip(batch["response_ids"].rows(), batch["finish_reason"].tolist()) if reason == 0]
    assert stopped and all(row[-1] == seven and seven not in row[:-1] for row in stopped)
    plain = rows_of(ranks.generate(single, prompts, n=8)[:1])
    for key, row in rows_of([batch]).items():
        shared = min(len(row), len(plain[key]))
        assert row[:shared] == plain[key][:shared]


def test_columns_of_the_result(ranks: Ranks, single: str) -> None:
    prompts = random_prompts([3, 6]).with_columns(answer=["a", "b"], difficulty=torch.tensor([1.5, 2.5]))
    batch = ranks.generate(single, prompts, n=2)[0]
    assert batch["prompt_id"].tolist() == [100, 100, 101, 101] and batch["sample_index"].tolist() == [0, 1, 0, 1]
    assert batch["answer"] == ["a", "a", "b", "b"] and batch["difficulty"].tolist() == [1.5, 1.5, 2.5, 2.5]
    assert batch["prompt_length"].tolist() == [3, 3, 6, 6] and batch["weight_version"].tolist() == [0] * 4
    assert torch.equal(batch["response_length"], batch["response_ids"].lengths)
    assert batch["response_ids"].values.dtype == torch.int64 and batch["rollout_log_prob"].values.dtype == torch.float32
    assert len(ranks.generate(single, prompts.select([]), n=2)[0]) == 0


def test_a_shared_weight_that_moves_is_noticed(ranks: Ranks, single: str) -> None:
    """CUDA graphs read a weight where it was at their capture."""
    for still, moved in ranks.pool.run(on_ranks.moved_weights, single):
        assert still == [] and len(moved) == 1


def test_generating_leaves_the_random_state_alone(ranks: Ranks, single: str) -> None:
    assert all(ranks.pool.run(on_ranks.rng_survives, single, random_prompts([5, 5]), OPTIONS))


def test_wrong_calls_are_typed_errors(ranks: Ranks, single: str) -> None:
    good = random_prompts([5, 6])

    def error(prompts: Batch, **options: object) -> str:
        messages = ranks.pool.run(on_ranks.generate_error, single, prompts, {**OPTIONS, **options})
        assert len(set(messages)) == 1
        return messages[0]

    assert error(good, version=9).startswith("PhaseError: generate was told weight version 9, but the generation weights are version 0")
    assert error(prompts_of([[5], []])).startswith("DataError: prompts [101] (prompt_id) are empty")
    long = error(random_prompts([on_ranks.MAX_MODEL_LEN - RESPONSE + 1]))
    assert long.startswith("DataError: prompts longer than 200 tokens") and "100: 201 tokens" in long
    assert error(random_prompts([on_ranks.MAX_MODEL_LEN - RESPONSE])) == "no error"


def test_generating_before_a_sync_and_unequal_prompts_in_a_replica_are_refused(ranks: Ranks) -> None:
    ranks.start("llama2", "llama", 2)
    ranks.sync("llama2", "llama", 0, 0)
    ranks.pool.run(on_ranks.sleep, "llama2")
    prompts = random_prompts([5, 6])
    early = ranks.pool.run(on_ranks.generate_error, "llama2", prompts, OPTIONS)
    assert all(m.startswith("PhaseError: generate needs phase 'generate', but the worker is in phase 'train'") for m in early)
    ranks.sync("llama2", "llama", 0, 0)
    check_against_hf(AutoModelForCausalLM.from_pretrained(ranks.paths["llama", 0], dtype=torch.float32),
                     ranks.generate("llama2", prompts)[0], 1.0)  # with its own groups, whatever engines came up since
    messages = ranks.pool.run(on_ranks.different_prompts, "llama2", prompts, OPTIONS)
    assert all("were given different prompts" in m for m in messages), messages
    assert ranks.pool.run(on_ranks.generate_error, "llama2", prompts, OPTIONS) == ["no error"] * 4
