"""Every rule refuses what it should, with key, value and the way out, and lets the neighbouring value pass."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridflow.config import keys
from hybridflow.config.model_facts import ModelFacts
from hybridflow.config.schema import Config, ParallelConfig
from hybridflow.config.validate import can_plan, validate
from hybridflow.config.warn import sequence_warning, warnings
from tests.config.support import BIASED, MIXTRAL, QWEN, SMOLLM2, WIDE, config_of

Changes = dict[str, object]


def test_the_complete_configuration_is_valid() -> None:
    for world, facts in ((1, SMOLLM2), (1, QWEN), (8, WIDE), (1, None)):
        assert validate(config_of(), world, facts) == []


PTX: Changes = {"algorithm__name": "safe_rlhf", "cost__function": "a:b", "algorithm__ptx_coef": 0.1, "data__ptx_files": ["b.jsonl"]}

# (world, facts, changes that fail, parts of the one message, the same with a value that passes)
RULES: list[tuple[int, ModelFacts | None, Changes, list[str], Changes]] = [
    # ranges and choices
    (1, None, {"algorithm__kl_in": "los"}, ["algorithm.kl_in=los", "did you mean loss?", "reward"], {"algorithm__kl_in": "loss"}),
    (1, None, {"algorithm__name": "rlo"}, ["algorithm.name=rlo", "did you mean rloo?"], {"algorithm__name": "rloo"}),
    (1, None, {"actor__model__dtype": "bf16"}, ["actor.model.dtype=bf16", "bfloat16"], {"actor__model__dtype": "bfloat16"}),
    (1, None, {"actor__recompute": "fully"}, ["actor.recompute=fully", "did you mean full?"], {"actor__recompute": "full"}),
    (1, None, {"cluster__device": "gpu"}, ["cluster.device=gpu", "cuda"], {"cluster__device": "cuda"}),
    (1, None, {"actor__optimizer__lr": 0.0}, ["actor.optimizer.lr=0.0", "above 0"], {"actor__optimizer__lr": 1e-9}),
    (1, None, {"actor__optimizer__lr": float("nan")}, ["actor.optimizer.lr=nan", "finite"], {"actor__optimizer__lr": 1e-9}),
    (1, None, {"actor__optimizer__beta2": 1.0}, ["actor.optimizer.beta2=1.0", "below 1"], {"actor__optimizer__beta2": 0.0}),
    (1, None, {"rollout__n": 0}, ["rollout.n=0", "at least 1"], {"rollout__n": 2}),
    (1, None, {"algorithm__clip_low": 1.01}, ["algorithm.clip_low=1.01", "at most 1"], {"algorithm__clip_low": 1.0}),
    (1, None, {"algorithm__kl_coef": -0.1}, ["algorithm.kl_coef=-0.1", "at least 0"], {"algorithm__kl_coef": 0.1}),
    (1, None, {"trainer__steps": 0}, ["trainer.steps=0", "at least 1"], {"trainer__steps": 1}),
    (1, None, {"reward__timeout_seconds": 0.0}, ["reward.timeout_seconds=0.0", "above 0"], {"reward__timeout_seconds": 0.1}),
    (1, None, {"actor__parallel__tp": 0}, ["actor.parallel.tp=0", "at least 1"], {"actor__parallel__tp": 1}),
    # required
    (1, None, {"actor__model__path": "???"}, ["actor.model.path is required"], {"actor__model__path": "/m"}),
    (1, None, {"data__train_files": "???"}, ["data.train_files is required"], {"data__train_files": ["a"]}),
    (1, None, {"data__train_files": []}, ["data.train_files is required"], {"data__train_files": ["a"]}),
    (1, None, {"reward__function": "???"}, ["reward.function is required"], {"reward__function": "a:b"}),
    # not there yet
    (1, None, {"engine_type": "fsdp"}, ["engine_type=fsdp", "engine_type=megatron"], {"engine_type": "megatron"}),
    (2, None, {"actor__parallel__vpp": 2}, ["actor.parallel.vpp=2", "needs pp of 2"],
     {"actor__parallel__vpp": 2, "actor__parallel__pp": 2}),
    # experts
    (2, WIDE, {"actor__parallel__ep": 2}, ["actor.parallel.ep=2", "/wide (llama) has no experts", "set it to 1"], {}),
    (2, WIDE, {"rollout__tp": 2, "rollout__ep": 2}, ["rollout.ep=2", "no experts"], {"rollout__tp": 2}),
    (3, MIXTRAL, {"actor__parallel__ep": 3, "data__train_batch_size": 3}, ["actor.parallel.ep=3", "8 experts of /mixtral", "works: 2 or 4"],
     {"data__train_batch_size": 3}),
    (4, MIXTRAL, {"actor__parallel__ep": 8}, ["ep=8 x etp=1 = 8", "4 ranks of a pipeline stage", "work: 4"], {"actor__parallel__ep": 4}),
    (4, MIXTRAL, {"actor__parallel__pp": 2, "actor__parallel__ep": 4}, ["ep=4 x etp=1 = 4", "2 ranks of a pipeline stage", "work: 2"],
     {"actor__parallel__pp": 2, "actor__parallel__ep": 2}),
    (3, MIXTRAL, {"actor__parallel__etp": 3, "data__train_batch_size": 3}, ["actor.parallel.etp=3", "14336 rows of an expert"],
     {"data__train_batch_size": 3}),
    (4, MIXTRAL, {"actor__parallel__tp": 2, "actor__parallel__ep": 2}, ["actor.parallel.tp=2", "set actor.parallel.sequence_parallel=true"],
     {"actor__parallel__tp": 2, "actor__parallel__ep": 2, "actor__parallel__sequence_parallel": True}),
    (4, MIXTRAL, {"rollout__tp": 4, "rollout__ep": 4, "cluster__device": "cpu"}, ["rollout.ep=4 with cluster.device=cpu", "use 1"],
     {"rollout__tp": 4, "rollout__ep": 4}),
    (4, BIASED, {"actor__parallel__pp": 2}, ["actor.parallel.pp=2", "float32 bias", "use actor.parallel.pp=1"], {}),
    (4, MIXTRAL, {"rollout__tp": 4, "rollout__ep": 2}, ["rollout.ep=2", "use 1 or 4"], {"rollout__tp": 4, "rollout__ep": 4}),
    # training layout
    (2, SMOLLM2, {"actor__parallel__tp": 2}, ["actor.parallel.tp=2", "9 attention heads", "3 key-value heads", "works: 1"], {}),
    (6, SMOLLM2, {"actor__parallel__tp": 6, "data__train_batch_size": 60}, ["actor.parallel.tp=6", "9 attention heads", "works: 3"],
     {"actor__parallel__tp": 3, "data__train_batch_size": 60}),
    (8, WIDE, {"actor__parallel__pp": 8, "actor__parallel__tp": 2}, ["tp=2 x pp=8 = 16", "8 ranks", "tp=1 pp=8", "tp=2 pp=4"],
     {"actor__parallel__pp": 4, "actor__parallel__tp": 2}),
    (32, SMOLLM2, {"actor__parallel__pp": 32}, ["actor.parallel.pp=32", "30 layers", "works: pp=30"], {"actor__parallel__pp": 16}),
    (4, SMOLLM2, {"actor__parallel__pp": 4, "actor__parallel__vpp": 2}, ["actor.parallel.vpp=2", "30 layers", "works with pp=4: vpp=1"],
     {"actor__parallel__pp": 4}),
    (6, WIDE, {"actor__parallel__cp": 4, "data__train_batch_size": 60}, ["tp=1 x pp=1 x cp=4 = 4", "6 ranks", "tp=1 pp=1 cp=3"],
     {"actor__parallel__cp": 3, "data__train_batch_size": 60}),
    (32, WIDE, {"actor__parallel__tp": 32}, [], {}),  # four ranks share a key-value head
    (24, replace(WIDE, heads=48, kv_heads=16, ffn=48), {"actor__parallel__tp": 24, "data__train_batch_size": 240},
     ["actor.parallel.tp=24", "16 key-value heads", "works: 8"], {"actor__parallel__tp": 8, "data__train_batch_size": 240}),
    (3, replace(SMOLLM2, ffn=1537), {"actor__parallel__tp": 3, "data__train_batch_size": 3}, ["1537 feed-forward rows"],
     {"actor__parallel__tp": 1, "data__train_batch_size": 3}),
    (2, WIDE, {"actor__parallel__sequence_parallel": True}, ["sequence_parallel=true", "tp=1"],
     {"actor__parallel__sequence_parallel": True, "actor__parallel__tp": 2}),
    # generation layout
    (8, WIDE, {"rollout__tp": 3}, ["rollout.tp=3", "8 ranks", "works: 2 or 4"], {"rollout__tp": 4}),
    (2, SMOLLM2, {"rollout__tp": 2}, ["rollout.tp=2", "9 attention heads", "works: 1"], {"rollout__tp": 1}),
    (9, SMOLLM2, {"rollout__tp": 9, "data__train_batch_size": 63}, ["rollout.tp=9", "1536 feed-forward rows", "works: 3"],
     {"rollout__tp": 3, "data__train_batch_size": 63}),
    (8, replace(WIDE, heads=24, kv_heads=6), {"rollout__tp": 4},
     ["rollout.tp=4", "neither divides 6 key-value heads", "works: 2"], {"rollout__tp": 2}),
    (6, WIDE, {"actor__parallel__tp": 2, "rollout__tp": 3, "data__train_batch_size": 60},
     ["rollout.tp=3", "actor.parallel.tp=2", "works: 2"], {"actor__parallel__tp": 2, "rollout__tp": 2, "data__train_batch_size": 60}),
    (16, replace(WIDE, vocab=65), {"rollout__tp": 16}, [], {}),  # pairs of ranks share a key-value head; the vocabulary is padded
    (128, replace(WIDE, heads=128, kv_heads=128, vocab=64), {"rollout__tp": 128, "data__train_batch_size": 128},
     ["rollout.tp=128", "vocabulary of 64"], {"rollout__tp": 64, "data__train_batch_size": 128}),
    # generation on ranks of its own
    (4, WIDE, {"rollout__ranks": 4}, ["rollout.ranks=4", "none of the 4 ranks"], {"rollout__ranks": 2}),
    (5, WIDE, {"rollout__ranks": 3, "rollout__tp": 2, "actor__parallel__tp": 2}, ["rollout.tp=2", "does not divide the 3 ranks"],
     {"rollout__ranks": 1, "rollout__tp": 1, "actor__parallel__tp": 4}),
    (3, WIDE, {"rollout__ranks": 2, "rollout__tp": 1, "data__train_batch_size": 5}, ["train_batch_size=5", "2 rollout replicas (2 ranks"],
     {"rollout__ranks": 2, "rollout__tp": 1, "data__train_batch_size": 4}),
    (2, None, {"rollout__ranks": 1, "actor__offload": True}, ["actor.offload=true with rollout.ranks=1"], {"rollout__ranks": 1}),
    (2, None, {"rollout__ranks": 1, "algorithm__name": "ppo", "critic__offload": True}, ["critic.offload=true with rollout.ranks=1"],
     {"rollout__ranks": 1, "algorithm__name": "ppo"}),
    (2, None, {"rollout__ranks": 1, "algorithm__name": "sft"}, ["rollout.ranks=1", "algorithm.name=sft"], {"algorithm__name": "sft"}),
    (12, replace(WIDE, heads=24, kv_heads=6, ffn=12288), {"actor__parallel__tp": 2, "rollout__tp": 3, "data__train_batch_size": 12},
     ["rollout.tp=3", "actor.parallel.tp=2"],  # only where the same ranks do both
     {"rollout__ranks": 6, "actor__parallel__tp": 2, "rollout__tp": 3, "data__train_batch_size": 12}),
    # batches
    (6, None, {"data__train_batch_size": 64, "rollout__n": 12}, ["data.train_batch_size=64", "6 rollout replicas", "60 or 66"],
     {"data__train_batch_size": 60, "rollout__n": 12}),
    (8, WIDE, {"data__train_batch_size": 6, "rollout__n": 3, "rollout__tp": 8}, ["18 responses", "8 data-parallel ranks", "8"],
     {"data__train_batch_size": 8, "rollout__n": 3, "rollout__tp": 8}),
    (4, None, {"algorithm__mini_batch_size": 200}, ["algorithm.mini_batch_size=200", "512 responses", "128 or 256"],
     {"algorithm__mini_batch_size": 256}),
    (4, None, {"algorithm__mini_batch_size": 2}, ["algorithm.mini_batch_size=2", "multiple of the 4", "works: 4"],
     {"algorithm__mini_batch_size": 4}),
    (4, None, {"algorithm__name": "sft", "data__train_batch_size": 10}, ["data.train_batch_size=10 rows", "4 data-parallel", "8 or 12"],
     {"algorithm__name": "sft", "data__train_batch_size": 12}),
    # lengths
    (1, SMOLLM2, {"data__max_prompt_length": 7169}, ["7169", "= 8193", "8192 positions"], {"data__max_prompt_length": 7168}),
    (1, None, {"actor__max_tokens_per_micro_batch": 2047}, ["actor.max_tokens_per_micro_batch=2047", "= 2048", "works: 2048"],
     {"actor__max_tokens_per_micro_batch": 2048}),
    (1, None, {"actor__log_prob_max_tokens_per_micro_batch": 2047}, ["actor.log_prob_max_tokens_per_micro_batch=2047"],
     {"actor__log_prob_max_tokens_per_micro_batch": 2048}),
    (1, None, {"reference__log_prob_max_tokens_per_micro_batch": 9, "algorithm__kl_coef": 0.1},
     ["reference.log_prob_max_tokens_per_micro_batch=9"], {"reference__log_prob_max_tokens_per_micro_batch": 9}),
    (1, None, {"rollout__max_num_batched_tokens": 255}, ["rollout.max_num_batched_tokens=255", "max_num_seqs=256"],
     {"rollout__max_num_batched_tokens": 256}),
    (1, SMOLLM2, {"rollout__kv_cache_gib": 0.04}, ["rollout.kv_cache_gib=0.04", "2048 tokens", "works: 0.044"],
     {"rollout__kv_cache_gib": 0.044}),
    (1, SMOLLM2, {"rollout__stop_token_ids": [2, 49152]}, ["rollout.stop_token_ids", "49152", "0 to 49151"],
     {"rollout__stop_token_ids": [2, 49151]}),
    # sampling
    (1, None, {"rollout__temperature": 0.0}, ["rollout.temperature=0", "val_temperature"], {"rollout__temperature": 0.6}),
    (1, None, {"rollout__top_p": 0.9}, ["rollout.top_p=0.9", "log-probs", "1.0"], {"rollout__top_p": 1.0}),
    (1, None, {"rollout__top_k": 50}, ["rollout.top_k=50", "log-probs", "-1"], {"rollout__top_k": -1}),
    (1, None, {"rollout__n": 1}, ["rollout.n=1", "grpo", "2 or more"], {"rollout__n": 2}),
    (1, None, {"rollout__n": 1, "algorithm__name": "rloo"}, ["rollout.n=1", "rloo", "2 or more"],
     {"rollout__n": 1, "algorithm__name": "remax"}),
    (1, None, {"algorithm__kl_target": 0.1}, ["algorithm.kl_target=0.1", "algorithm.kl_in=reward"],
     {"algorithm__kl_target": 0.1, "algorithm__kl_in": "reward", "algorithm__kl_coef": 0.01}),
    (1, None, {"algorithm__kl_target": 0.1, "algorithm__kl_in": "reward"}, ["algorithm.kl_coef=0", "stays 0"],
     {"algorithm__kl_target": 0.1, "algorithm__kl_in": "reward", "algorithm__kl_coef": 0.01}),
    (1, None, {"algorithm__kl_target": 0.1, "algorithm__kl_in": "reward", "algorithm__kl_coef": 0.01, "algorithm__kl_horizon": 102},
     ["algorithm.kl_horizon=102", "512 responses", "turn its sign", "works: 103"],
     {"algorithm__kl_target": 0.1, "algorithm__kl_in": "reward", "algorithm__kl_coef": 0.01, "algorithm__kl_horizon": 103}),
    (1, None, {"algorithm__overlong_buffer": 1025}, ["algorithm.overlong_buffer=1025", "rollout.max_response_length=1024", "works: 1024"],
     {"algorithm__overlong_buffer": 1024}),
    (1, None, {"algorithm__policy_loss": "cispo", "algorithm__dual_clip": 3.0}, ["algorithm.dual_clip=3.0", "cispo", "null"],
     {"algorithm__policy_loss": "cispo"}),
    (1, None, {"algorithm__policy_loss": "cispo", "algorithm__ratio": "sequence"}, ["algorithm.ratio=sequence", "CISPO"],
     {"algorithm__ratio": "sequence"}),
    (1, None, {"algorithm__dual_clip": 1.0}, ["algorithm.dual_clip=1.0", "above 1"], {"algorithm__dual_clip": 3.0}),
    (1, None, {"rollout__stop": [""]}, ["rollout.stop", "empty"], {"rollout__stop": ["\n"]}),
    # reward, names, optimizer
    (1, None, {"reward__function": "rewards.py"}, ["reward.function=rewards.py", "package.module:name"], {"reward__function": "a.b:c"}),
    (1, None, {"reward__function": "a:b:c"}, ["reward.function=a:b:c"], {"reward__function": "a:b"}),
    (1, None, {"trainer__name": "a/b"}, ["trainer.name='a/b'"], {"trainer__name": "a-b"}),
    (1, None, {"actor__optimizer__min_lr": 1e-5}, ["actor.optimizer.min_lr=1e-05", "lr=1e-06"], {"actor__optimizer__min_lr": 1e-7}),
    (1, None, {"actor__optimizer__moments_dtype": "bfloat16", "actor__model__dtype": "float32"},
     ["actor.optimizer.moments_dtype=bfloat16", "float32 model"], {"actor__optimizer__moments_dtype": "bfloat16"}),
    (1, None, {"actor__optimizer__moments_dtype": "bfloat16", "cluster__device": "cpu"},
     ["actor.optimizer.moments_dtype=bfloat16", "cluster.device=cpu"], {"cluster__device": "cpu"}),
    (1, None, {"actor__model__transformer_impl": "transformer_engine", "cluster__device": "cpu"},
     ["actor.model.transformer_impl=transformer_engine", "cluster.device=cpu"], {"actor__model__transformer_impl": "local"}),
    (1, None, {"trainer__steps": 3, "actor__optimizer__warmup_steps": 3},
     ["actor.optimizer.warmup_steps=3", "3 optimizer steps", "works: 2"],
     {"trainer__steps": 3, "actor__optimizer__warmup_steps": 2}),
    (1, None, {"trainer__steps": 4, "algorithm__name": "ppo", "critic__warmup_steps": 3, "actor__optimizer__warmup_steps": 1},
     ["actor.optimizer.warmup_steps=1", "1 optimizer steps"],  # the actor sits out three of the four
     {"trainer__steps": 4, "algorithm__name": "ppo", "critic__warmup_steps": 2, "actor__optimizer__warmup_steps": 1}),
    # supervised
    (1, None, {"algorithm__name": "sft", "rollout__temperature": 0.6}, ["rollout.temperature=0.6", "sft"], {"algorithm__name": "sft"}),
    (1, None, {"algorithm__name": "sft", "algorithm__kl_coef": 0.1}, ["algorithm.kl_coef=0.1", "sft"], {"algorithm__name": "sft"}),
    (1, SMOLLM2, {"algorithm__name": "sft", "data__max_response_length": 7169},
     ["data.max_response_length=7169", "= 8193", "8192 positions"], {"algorithm__name": "sft", "data__max_response_length": 7168}),
    # preferences
    (1, None, {"algorithm__name": "dpo", "algorithm__kl_coef": 0.1}, ["algorithm.kl_coef=0.1", "algorithm.beta"],
     {"algorithm__name": "dpo"}),
    (4, None, {"algorithm__name": "dpo", "data__train_batch_size": 10}, ["data.train_batch_size=10 rows", "of the actor", "8 or 12"],
     {"algorithm__name": "dpo", "data__train_batch_size": 12}),
    (4, None, {"algorithm__name": "reward_model", "algorithm__mini_batch_size": 4}, ["mini_batch_size=4", "4 data-parallel", "a pair", "8"],
     {"algorithm__name": "reward_model", "algorithm__mini_batch_size": 8}),
    (1, None, {"algorithm__name": "dpo", "algorithm__preference_loss": "ipo", "algorithm__label_smoothing": 0.1},
     ["algorithm.label_smoothing=0.1", "preference_loss=ipo"], {"algorithm__name": "dpo", "algorithm__label_smoothing": 0.1}),
    (1, None, {"algorithm__name": "dpo", "actor__max_tokens_per_micro_batch": 4095},
     ["actor.max_tokens_per_micro_batch=4095", "pair of sequences", "2 x (data.max_prompt_length=1024", "works: 4096"],
     {"algorithm__name": "dpo", "actor__max_tokens_per_micro_batch": 4096}),
    (1, None, {"algorithm__name": "ppo", "data__ptx_files": ["b.jsonl"]}, ["data.ptx_files=['b.jsonl']", "only safe_rlhf reads them"],
     {"algorithm__name": "ppo"}),
    (1, None, {"algorithm__name": "sft", "data__ptx_files": ["b.jsonl"]}, ["data.ptx_files=['b.jsonl']", "only safe_rlhf reads them"],
     {"algorithm__name": "sft"}),
    (1, SMOLLM2, {**PTX, "data__max_response_length": 7169},
     ["data.max_response_length=7169", "8193 tokens", "8192 of /smollm2", "works: 7168"],
     {**PTX, "data__max_response_length": 7168}),
    (1, None, {**PTX, "actor__max_tokens_per_micro_batch": 2048, "data__max_response_length": 1025},
     ["data.max_response_length=1025", "actor.max_tokens_per_micro_batch=2048", "works: 1024"],
     {**PTX, "actor__max_tokens_per_micro_batch": 2048, "data__max_response_length": 1024}),
    (1, None, {"algorithm__name": "kto", "algorithm__mini_batch_size": 1}, ["algorithm.mini_batch_size=1", "reference point", "2 or more"],
     {"algorithm__name": "kto", "algorithm__mini_batch_size": 2}),
    (1, None, {"algorithm__name": "kto", "data__train_batch_size": 1}, ["data.train_batch_size=1", "2 or more"],
     {"algorithm__name": "kto", "data__train_batch_size": 2}),
]


@pytest.mark.parametrize("world, facts, changes, parts, passing", RULES, ids=lambda value: str(value)[:60])
def test_rules(world: int, facts: ModelFacts | None, changes: Changes, parts: list[str], passing: Changes) -> None:
    problems = validate(config_of(**changes), world, facts)
    if not parts:
        assert problems == []
        return
    matching = [problem for problem in problems if all(part in problem for part in parts)]
    assert len(matching) == 1, problems
    assert validate(config_of(**passing), world, facts) == []


def test_all_problems_are_reported_at_once() -> None:
    config = config_of(actor__parallel__tp=2, rollout__temperature=0.0, rollout__top_k=3, reward__function="x", algorithm__kl_in="los",
                       data__max_prompt_length=9000, actor__parallel__vpp=2, trainer__steps=0, engine_type="fsdp",
                       data__train_batch_size=63)
    found = validate(config, 4, SMOLLM2)
    for part in ("actor.parallel.tp=2", "temperature=0", "top_k=3", "reward.function=x", "kl_in=los", "9000", "vpp=2", "steps=0", "fsdp",
                 "train_batch_size=63"):
        assert any(part in problem for problem in found), part


def test_supervised_training_needs_neither_reward_nor_rollout() -> None:
    config = config_of(algorithm__name="sft", reward__function="???", rollout__tp=7, rollout__n=1, data__train_batch_size=10)
    assert validate(config, 2, SMOLLM2) == [] and can_plan(config, 2)


def test_a_reference_model_of_its_own_must_fit() -> None:
    def found(**changes: object) -> list[str]:
        return validate(config, 3, SMOLLM2, {"reference": replace(SMOLLM2, path="/other", **changes)})

    config = config_of(algorithm__kl_coef=0.1, reference__model__path="/other", actor__parallel__tp=3, data__train_batch_size=60)
    assert found() == []
    (problem,) = found(vocab=50000)
    assert "/other" in problem and "50000" in problem and "49152" in problem
    (problem,) = found(heads=8, kv_heads=8)
    assert "reference.parallel.tp=3" in problem and "8 attention heads" in problem
    (problem,) = found(max_positions=512)
    assert "512 positions of /other" in problem
    config.algorithm.kl_coef = 0.0
    assert found(vocab=50000) == []


def test_a_role_with_ranks_of_its_own() -> None:
    config = config_of(algorithm__kl_coef=0.1, reference__ranks=2, data__train_batch_size=60)
    config.reference.parallel = ParallelConfig(tp=2)
    assert validate(config, 6, WIDE) == [] and can_plan(config, 6)
    (problem,) = validate(config, 2, WIDE)
    assert "reference.ranks=2" in problem and "none of the 2 ranks" in problem and not can_plan(config, 2)
    config.reference.parallel = ParallelConfig(tp=3)
    (problem,) = [problem for problem in validate(config, 6, WIDE) if "2 ranks" in problem]
    assert "reference.parallel.tp=3" in problem


def test_every_key_named_in_a_message_exists() -> None:
    words = set()
    for world, facts, changes, _, _ in RULES:
        for problem in validate(config_of(**changes), world, facts):
            words.update(word.split("=")[0].strip(":;,()") for word in problem.split() if "=" in word and "." in word.split("=")[0])
    assert words and all(keys.find(word) or word == "rewards.py" for word in words), [word for word in words if not keys.find(word)]


def test_every_number_and_choice_has_a_range() -> None:
    """A number without a range accepts nonsense; the exceptions are scores and the limit of one, which may be anything."""
    free = {key for key, leaf in keys.leaves().items() if leaf.inner in (int, float) and not leaf.metadata}
    scores = {"timeout_reward", "error_reward"}
    assert free == {f"{section}.{name}" for section in ("reward", "cost") for name in scores} | {"cost.limit"}


@pytest.mark.parametrize("changes, part", [
    ({"algorithm__kl_estimator": "k1", "algorithm__kl_coef": 0.1}, "expected gradient of k1 is zero"),
    ({"algorithm__max_refills": 3}, "algorithm.max_refills=3 has no effect with algorithm.name=grpo"),
    ({"algorithm__name": "remax", "algorithm__advantage_norm": "batch"}, "algorithm.advantage_norm=batch has no effect"),
    ({"algorithm__kl_horizon": 500}, "algorithm.kl_horizon=500 has no effect without algorithm.kl_target"),
    ({"algorithm__importance_level": "sequence"}, "no effect without algorithm.importance_correction"),
    ({"algorithm__overlong_penalty": 2.0}, "no effect without algorithm.overlong_buffer"),
    ({"algorithm__name": "rloo", "algorithm__gamma": 0.9}, "algorithm.gamma=0.9 has no effect"),
    ({"actor__optimizer__min_lr": 1e-7}, "no effect with actor.optimizer.schedule=constant"),
    ({"trainer__steps": 3, "trainer__epochs": 2}, "trainer.epochs=2 has no effect"),
    ({"trainer__val_interval": 5}, "no effect without data.val_files"),
])
def test_warnings(changes: Changes, part: str) -> None:
    assert warnings(config_of()) == []
    config: Config = config_of(**changes)
    assert validate(config, 1, SMOLLM2) == []
    (warning,) = warnings(config)
    assert part in warning


def test_waves_are_announced() -> None:
    assert sequence_warning(config_of(rollout__max_num_seqs=240), 240) == []
    (warning,) = sequence_warning(config_of(rollout__max_num_seqs=100), 240)
    assert "240 sequences" in warning and "3 waves" in warning


def test_a_cache_that_cannot_hold_the_sequences_is_announced() -> None:
    config = config_of(rollout__kv_cache_gib=1.0)
    assert sequence_warning(config, 22, SMOLLM2) == []
    (warning,) = sequence_warning(config, 23, SMOLLM2)
    assert "holds 22 sequences of the full 2048 tokens" in warning and "the 23 decoded together" in warning
