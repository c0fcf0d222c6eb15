"""The configuration: one dataclass per group, each field documented where it stands. Imports neither torch nor ray.

configs/train.yaml and its groups give the same tree to Hydra; a key that is not here is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class ModelConfig:
    path: str = MISSING  # Hugging Face model folder (config.json, safetensors, tokenizer files)
    tokenizer_path: str | None = None  # null: the model folder
    dtype: str = "bfloat16"  # bfloat16 or float32: parameters and activations (optimizer state is always float32)
    chat_template: str | None = None  # file with a Jinja template; null: the tokenizer's own


@dataclass
class ParallelConfig:
    tp: int = 1  # tensor parallel
    pp: int = 1  # pipeline parallel
    cp: int = 1  # context parallel
    ep: int = 1  # expert parallel
    etp: int = 1  # tensor parallel inside an expert
    vpp: int = 1  # virtual pipeline chunks per stage
    sequence_parallel: bool = False  # shard norms and dropout over the tensor-parallel ranks


@dataclass
class OptimizerConfig:
    lr: float = 1e-6  # peak learning rate
    min_lr: float = 0.0  # floor of a decaying schedule
    schedule: str = "constant"  # constant, linear or cosine
    warmup_steps: int = 0  # optimizer steps of linear warm-up from 0
    weight_decay: float = 0.01  # on matrices only; biases and norms are never decayed
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0  # bound of the global gradient norm; 0: no clipping


@dataclass
class ActorConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: int = 16384  # token budget of one packed micro-batch with gradients
    log_prob_max_tokens_per_micro_batch: int = 32768  # the same without gradients
    recompute: str = "none"  # none, selective or full activation recomputation
    offload: bool = False  # move gradients and optimizer state to host memory while generating


@dataclass
class ReferenceConfig:
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="${actor.model.path}", dtype="${actor.model.dtype}"))
    log_prob_max_tokens_per_micro_batch: int = 32768  # token budget of one packed micro-batch


@dataclass
class RolloutConfig:
    n: int = 8  # responses per prompt
    tp: int = 1  # tensor parallel inside one engine replica; the number of replicas follows from the ranks
    temperature: float = 1.0  # of sampling, and of the log-probs training uses
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    max_response_length: int = 1024  # tokens
    stop: list[str] = field(default_factory=list)  # strings that end a response
    stop_token_ids: list[int] = field(default_factory=list)  # token ids that end a response besides eos
    ignore_eos: bool = False
    max_num_seqs: int = 256  # sequences one replica decodes at a time
    max_num_batched_tokens: int = 8192  # tokens of one engine step
    kv_cache_gib: float = 8.0  # key-value cache per rank
    enforce_eager: bool = False  # no CUDA graphs
    bucket_mib: int = 256  # resharding: bytes one collective moves at most
    log_prob_gap_warning: float = 0.05  # warn when mean |rollout - trainer log-prob| of a step is above
    val_temperature: float = 0.0  # sampling temperature of validation; 0: greedy


@dataclass
class RewardConfig:
    function: str = MISSING  # package.module:name
    kwargs: dict[str, Any] = field(default_factory=dict)  # extra keyword arguments of the function
    workers: int = 2  # processes that run it
    timeout_seconds: float = 30.0  # wall clock per response
    timeout_reward: float = 0.0  # score of a response whose call timed out (counted in reward/timeouts)
    on_error: str = "raise"  # raise: a reward function that raises ends the run; score: error_reward, counted
    error_reward: float = 0.0


@dataclass
class AlgorithmConfig:
    name: str = "grpo"  # a name of hybridflow.algorithms.registry
    update_epochs: int = 1  # passes over one rollout
    mini_batch_size: int | None = None  # responses per optimizer step; null: all of the rollout
    clip_low: float = 0.2  # ratio >= 1 - clip_low
    clip_high: float = 0.2  # ratio <= 1 + clip_high
    normalize_std: bool = True  # divide group advantages by the group's standard deviation
    kl_coef: float = 0.0  # 0: no reference role unless track_kl
    kl_in: str = "loss"  # loss or reward
    kl_estimator: str = "k3"  # k1, k2 or k3
    track_kl: bool = False  # keep the reference role for the metric even with kl_coef=0
    entropy_coef: float = 0.0  # added to the objective (raises entropy)
    loss_aggregation: str = "token_mean"  # token_mean, seq_mean (mean of each response's mean) or constant (sum / (B * max_response_length))


@dataclass
class DataConfig:
    train_files: list[str] = MISSING  # parquet, JSONL, or a Hugging Face dataset folder
    val_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"  # column: a string, or chat messages [{role, content}, ...]
    response_key: str = "response"  # column with the target text (SFT)
    apply_chat_template: bool = False  # render a plain string prompt as one user message
    max_prompt_length: int = 1024  # tokens
    prompt_too_long: str = "error"  # error, left (keep the last tokens), right (keep the first) or filter
    malformed_rows: str = "error"  # error, or skip (counted)
    train_batch_size: int = 64  # prompts per step
    val_batch_size: int | None = None  # prompts per validation call; null: all
    max_val_samples: int | None = None
    shuffle: bool = True


@dataclass
class TrainerConfig:
    name: str = "default"  # run name: the folder below output_dir
    output_dir: str = "runs"
    seed: int = 1
    steps: int | None = None  # rollout-update steps; null: epochs
    epochs: int = 1  # passes over the data when steps is null
    val_interval: int = 0  # validate every k steps; 0: only at the end
    val_before_train: bool = True
    rollouts_per_step: int = 4  # sampled rollouts written per step
    save_final: bool = True  # write the last weights as a Hugging Face model
    overwrite: bool = False  # allow a run folder that exists


@dataclass
class ClusterConfig:
    device: str = "auto"  # auto, cpu or cuda
    ranks_per_node: int | None = None  # worker processes per node; null: one per GPU (CPU: 1)
    start_timeout_seconds: float = 300.0  # for Ray and the workers to come up
    phase_timeout_seconds: float = 1800.0  # for one call of a worker
    object_store_gib: float = 1.0  # shared memory of Ray's object store per node


@dataclass
class Config:
    engine_type: str = "megatron"
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
