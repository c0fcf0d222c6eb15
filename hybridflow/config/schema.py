"""The configuration: one dataclass per group, each field documented where it stands. Imports neither torch nor ray.

configs/train.yaml and its groups give the same tree to Hydra; a key that is not here is refused. `setting` states the range
of a value beside it; config/ranges.py checks it. Rules between several values are in config/validate.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from omegaconf import MISSING

from hybridflow.config.algorithms import NAMES

TRANSFORMER_IMPLEMENTATIONS = ("auto", "local", "transformer_engine")


def setting(default: Any, **limits: Any) -> Any:
    """A field with a declared range: `choices` (tuple of text), `minimum` / `maximum` (inclusive), `above` / `below` (exclusive)."""
    return field(default=default, metadata=limits)


def like(section: type, key: str) -> Any:
    """A section whose every value follows that of the section `key`, unless it is set."""
    return field(default_factory=lambda: _following(section, key))


def _following(section: type, key: str) -> Any:
    types = get_type_hints(section)
    values = {entry.name: f"{key}.{entry.name}" for entry in fields(section)}
    return section(**{name: _following(types[name], at) if is_dataclass(types[name]) else f"${{{at}}}" for name, at in values.items()})


@dataclass
class WeightsConfig:
    path: str = MISSING  # Hugging Face model folder (config.json, safetensors)
    dtype: str = setting("bfloat16", choices=("bfloat16", "float32"))  # parameters and activations
    # layers: Megatron's own (local) or Transformer Engine's; auto: Transformer Engine's where it is installed (bfloat16 on a GPU)
    transformer_impl: str = setting("auto", choices=TRANSFORMER_IMPLEMENTATIONS)


@dataclass
class ModelConfig(WeightsConfig):
    tokenizer_path: str | None = None  # null: the model folder
    chat_template: str | None = None  # file with a Jinja template; null: the tokenizer's own


@dataclass
class ParallelConfig:
    tp: int = setting(1, minimum=1)  # tensor parallel
    pp: int = setting(1, minimum=1)  # pipeline parallel
    cp: int = setting(1, minimum=1)  # context parallel
    ep: int = setting(1, minimum=1)  # expert parallel
    etp: int = setting(1, minimum=1)  # tensor parallel inside an expert
    vpp: int = setting(1, minimum=1)  # virtual pipeline chunks per stage
    sequence_parallel: bool = False  # shard norms and dropout over the tensor-parallel ranks


@dataclass
class OptimizerConfig:
    lr: float = setting(1e-6, above=0)  # peak learning rate
    min_lr: float = setting(0.0, minimum=0)  # floor of a decaying schedule
    # constant; linear or cosine decay over the run; wsd: constant, then linear over the last decay_steps (arXiv 2404.06395)
    schedule: str = setting("constant", choices=("constant", "linear", "cosine", "wsd"))
    decay_steps: int | None = setting(None, minimum=1)  # wsd: optimizer steps of its decay; null: a tenth of the run
    warmup_steps: int = setting(0, minimum=0)  # optimizer steps of linear warm-up from 0
    weight_decay: float = setting(0.01, minimum=0)  # on matrices only; biases and norms are never decayed
    beta1: float = setting(0.9, minimum=0, below=1)
    beta2: float = setting(0.999, minimum=0, below=1)
    eps: float = setting(1e-8, above=0)
    clip_grad: float = setting(1.0, minimum=0)  # bound of the global gradient norm; 0: no clipping
    # of AdamW's two moments. bfloat16: they take half the memory, and the float32 weights only what bfloat16 leaves out (6 bytes a
    # parameter instead of 12); bfloat16 models with Transformer Engine
    moments_dtype: str = setting("float32", choices=("float32", "bfloat16"))


@dataclass
class ActorConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    max_tokens_per_micro_batch: int = setting(16384, minimum=1)  # token budget of one packed micro-batch with gradients
    log_prob_max_tokens_per_micro_batch: int = setting(32768, minimum=1)  # the same without gradients
    recompute: str = setting("none", choices=("none", "selective", "full"))  # activation recomputation
    offload: bool = False  # move gradients and optimizer state to host memory while generating


@dataclass
class PlacedConfig:
    """A role with a model of its own. It shares processes with the roles of its ranks that have the same layout."""

    model: WeightsConfig = like(WeightsConfig, "actor.model")
    parallel: ParallelConfig = like(ParallelConfig, "actor.parallel")
    ranks: int | None = setting(None, minimum=1)  # ranks it has alone, taken from the end of the cluster's; null: the actor's ranks


@dataclass
class ReferenceConfig(PlacedConfig):
    log_prob_max_tokens_per_micro_batch: int = setting(32768, minimum=1)  # token budget of one packed micro-batch


@dataclass
class DeadlineConfig:
    """Seconds each phase of the switch between training and generating may take; a run that exceeds one ends with its name."""

    offload: float = setting(300.0, above=0)  # gradients and optimizer state to host memory
    wake: float = setting(120.0, above=0)  # memory of the engine's weights, later of its cache
    reshard: float = setting(600.0, above=0)  # the transfer of the weights
    sleep: float = setting(120.0, above=0)  # the engine gives its memory back
    onload: float = setting(300.0, above=0)  # gradients and optimizer state back to the device


@dataclass
class CriticConfig(PlacedConfig):
    """The value model of PPO and Safe-RLHF; its model may be a language model or a sequence-classification checkpoint."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    max_tokens_per_micro_batch: int = setting(16384, minimum=1)  # token budget of one packed micro-batch with gradients
    value_max_tokens_per_micro_batch: int = setting(32768, minimum=1)  # the same without gradients
    recompute: str = setting("none", choices=("none", "selective", "full"))  # activation recomputation
    offload: bool = False  # move gradients and optimizer state to host memory while generating
    clip_value: float | None = setting(0.2, above=0)  # bound of a value's change against the rollout's; null: no clipping
    warmup_steps: int = setting(0, minimum=0)  # first steps of the run that train the critic alone, not the actor


@dataclass
class RolloutConfig:
    n: int = setting(8, minimum=1)  # responses per prompt
    tp: int = setting(1, minimum=1)  # tensor parallel inside one engine replica; the number of replicas follows from the ranks
    ep: int = setting(1, minimum=1)  # experts: 1: each cut over the tp ranks; equal to tp: whole experts, dealt to them
    ranks: int | None = setting(None, minimum=1)  # ranks that only generate, taken from the end of the cluster's; null: the actor's ranks
    temperature: float = setting(1.0, minimum=0)  # of sampling, and of the log-probs training uses
    top_p: float = setting(1.0, above=0, maximum=1)
    top_k: int = setting(-1, minimum=-1)  # -1: off
    max_response_length: int = setting(1024, minimum=1)  # tokens
    stop: list[str] = field(default_factory=list)  # strings that end a response
    stop_token_ids: list[int] = field(default_factory=list)  # token ids that end a response besides eos
    ignore_eos: bool = False
    max_num_seqs: int = setting(256, minimum=1)  # sequences one replica decodes at a time
    max_num_batched_tokens: int = setting(8192, minimum=1)  # tokens of one engine step
    kv_cache_gib: float = setting(8.0, above=0)  # key-value cache per rank
    enforce_eager: bool = False  # no CUDA graphs
    bucket_mib: int = setting(256, minimum=1)  # resharding: memory of all transfer buffers of a rank
    # auto: a generation weight that is laid out like a training weight of its rank is that weight (no copy, no memory); off: copies
    alias_weights: str = setting("auto", choices=("auto", "off"))
    sync_checksum: bool = False  # after every sync compare a checksum of each region with the rank it came from
    probe_interval: int = setting(50, minimum=0)  # compare rollout and trainer log-probs of fixed tokens at the first and every k-th sync
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    log_prob_gap_warning: float = setting(0.05, above=0)  # warn when mean |rollout - trainer log-prob| of a step is above
    val_temperature: float = setting(0.0, minimum=0)  # sampling temperature of validation; 0: greedy


@dataclass
class RewardConfig:
    function: str = MISSING  # package.module:name; may be left out where models score
    kwargs: dict[str, Any] = field(default_factory=dict)  # extra keyword arguments of the function
    workers: int = setting(2, minimum=1)  # processes that run it
    concurrency: int = setting(64, minimum=1)  # calls of an `async def` function in flight in each process
    timeout_seconds: float = setting(30.0, above=0)  # wall clock per response
    timeout_reward: float = 0.0  # score of a response whose call timed out (counted in reward/timeouts)
    # A reward function that raises: raise ends the run; score gives error_reward, counted.
    on_error: str = setting("raise", choices=("raise", "score"))
    error_reward: float = 0.0

    @property
    def section(self) -> str:
        """The key these settings stand at."""
        return "reward"


@dataclass
class CostConfig(RewardConfig):
    """Safe-RLHF: what a response costs (by the function, by models, or their sum), and the limit the mean cost is held to."""

    models: dict[str, Any] = field(default_factory=dict)  # models of costs: name -> settings or model folder, as in reward_models
    critic: CriticConfig = like(CriticConfig, "critic")  # the value model of costs
    limit: float = 0.0  # mean cost per response that is allowed
    multiplier: float = setting(1.0, above=0)  # Lagrange multiplier at the start
    multiplier_lr: float = setting(0.1, above=0)  # its learning rate in log space
    multiplier_max: float = setting(20.0, above=0)  # it never rises above

    @property
    def section(self) -> str:
        return "cost"


@dataclass
class AlgorithmConfig:
    name: str = setting("grpo", choices=NAMES)  # algorithm=NAME also takes the settings of configs/algorithm/NAME.yaml
    update_epochs: int = setting(1, minimum=1)  # passes over one rollout
    mini_batch_size: int | None = setting(None, minimum=1)  # responses per optimizer step; null: all of the rollout
    # scale of group advantages: the group's standard deviation, the batch's, or none
    advantage_norm: str = setting("group", choices=("group", "batch", "none"))
    gamma: float = setting(1.0, above=0, maximum=1)  # discount per token where advantages are made token by token
    lam: float = setting(1.0, minimum=0, maximum=1)  # lambda of GAE, where there is a critic
    # clip: clipped surrogate of PPO; cispo: clipped weight, no gradient through it
    policy_loss: str = setting("clip", choices=("clip", "cispo"))
    ratio: str = setting("token", choices=("token", "sequence"))  # sequence: geometric mean over the response (GSPO)
    clip_low: float = setting(0.2, above=0, maximum=1)  # ratio >= 1 - clip_low
    clip_high: float = setting(0.2, above=0)  # ratio <= 1 + clip_high
    dual_clip: float | None = setting(None, above=1)  # with a negative advantage A the loss is at most -dual_clip A; null: no bound
    kl_coef: float = setting(0.0, minimum=0)  # 0: no reference role unless track_kl
    kl_in: str = setting("loss", choices=("loss", "reward"))  # where the penalty enters
    kl_estimator: str = setting("k3", choices=("k1", "k2", "k3"))
    kl_target: float | None = setting(None, above=0)  # nats per token that kl_coef is steered to (kl_in=reward); null: kl_coef is fixed
    kl_horizon: int = setting(10000, minimum=1)  # responses over which kl_coef changes by at most 20 %
    track_kl: bool = False  # keep the reference role for the metric even with kl_coef=0
    entropy_coef: float = setting(0.0, minimum=0)  # added to the objective (raises entropy)
    # token_mean, seq_mean (mean of each response's mean) or constant (sum / (B * max_response_length))
    loss_aggregation: str = setting("token_mean", choices=("token_mean", "seq_mean", "constant"))
    # weight w = trainer / rollout probability of what was sampled. none: measured only; truncate: min(w, bound); mask: 0 outside
    # [1 / bound, bound]
    importance_correction: str = setting("none", choices=("none", "truncate", "mask"))
    importance_level: str = setting("token", choices=("token", "sequence"))  # sequence: product over the response
    importance_bound: float = setting(2.0, above=1)
    mask_truncated: bool = False  # responses that hit rollout.max_response_length are not trained on
    overlong_buffer: int = setting(0, minimum=0)  # last tokens of rollout.max_response_length over which a penalty grows; 0: off
    overlong_penalty: float = setting(1.0, minimum=0)  # taken off the reward of a response of full length
    ptx_coef: float = setting(0.0, minimum=0)  # Safe-RLHF: weight of the likelihood of data.ptx_files in the actor's loss
    max_refills: int = setting(0, minimum=0)  # DAPO: further draws of prompts in place of groups with equal rewards; 0: keep them
    beta: float = setting(0.1, above=0)  # DPO, KTO: scale of the implicit reward, log policy - log reference of a response
    # of a pair of responses: dpo, or ipo (squared distance to a margin of 1 / (2 beta))
    preference_loss: str = setting("dpo", choices=("dpo", "ipo"))
    label_smoothing: float = setting(0.0, minimum=0, below=0.5)  # DPO: assumed share of pairs with the wrong response chosen
    desirable_weight: float = setting(1.0, above=0)  # KTO: weight of the loss of desirable responses
    undesirable_weight: float = setting(1.0, above=0)  # KTO: weight of the loss of the others


@dataclass
class DataConfig:
    train_files: list[str] = MISSING  # parquet, JSONL, or a Hugging Face dataset folder
    val_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"  # column: a string, or chat messages [{role, content}, ...]
    response_key: str = "response"  # column with the given response (SFT, KTO): a string, or the chat messages that answer the prompt
    chosen_key: str = "chosen"  # column with the better response of a pair (DPO, reward model), written like response_key's
    rejected_key: str = "rejected"  # column with the worse response of a pair
    label_key: str = "label"  # column that says whether the response is desirable (KTO): true or false
    margin_key: str | None = None  # column with how much better the chosen response is (reward model); null: no margin
    apply_chat_template: bool = False  # render a plain string prompt as one user message
    max_prompt_length: int = setting(1024, minimum=1)  # tokens
    # error, left (keep the last tokens), right (keep the first) or filter
    prompt_too_long: str = setting("error", choices=("error", "left", "right", "filter"))
    max_response_length: int = setting(1024, minimum=1)  # tokens of a given response, its EOS included
    # error, right (keep the first tokens, without EOS) or filter
    response_too_long: str = setting("error", choices=("error", "right", "filter"))
    malformed_rows: str = setting("error", choices=("error", "skip"))  # error, or skip (counted)
    train_batch_size: int = setting(64, minimum=1)  # prompts per step
    val_batch_size: int | None = setting(None, minimum=1)  # prompts per validation call; null: all
    max_val_samples: int | None = setting(None, minimum=1)
    shuffle: bool = True
    ptx_files: list[str] = field(default_factory=list)  # prompts with responses whose likelihood is kept up (algorithm.ptx_coef)
    ptx_batch_size: int = setting(16, minimum=1)  # rows of them beside each mini-batch


@dataclass
class TrainerConfig:
    name: str = "default"  # run name: the folder below output_dir
    output_dir: str = "runs"
    seed: int = setting(1, minimum=0, maximum=2**32 - 1)
    steps: int | None = setting(None, minimum=1)  # rollout-update steps; null: epochs
    epochs: int = setting(1, minimum=1)  # passes over the data when steps is null
    val_interval: int = setting(0, minimum=0)  # validate every k steps; 0: only at the end
    val_before_train: bool = True
    rollouts_per_step: int = setting(4, minimum=0)  # sampled rollouts written per step
    save_final: bool = True  # write the last weights as a Hugging Face model
    # checkpoint whose controllers, running statistics and light heads the run goes on with (docs/algorithms.md); null: they start anew
    state_path: str | None = None
    overwrite: bool = False  # allow a run folder that exists


@dataclass
class ClusterConfig:
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    ranks_per_node: int | None = setting(None, minimum=1)  # worker processes per node; null: one per GPU (CPU: 1)
    start_timeout_seconds: float = setting(300.0, above=0)  # for Ray and the workers to come up
    phase_timeout_seconds: float = setting(1800.0, above=0)  # for one call of a worker
    object_store_gib: float = setting(1.0, minimum=0.075)  # shared memory of Ray's object store per node; 0.075 is Ray's least


@dataclass
class Config:
    engine_type: str = setting("megatron", choices=("megatron", "fsdp"))  # training engine
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_models: dict[str, Any] = field(default_factory=dict)  # name -> settings (config/reward_models.py) or model folder
    cost: CostConfig = field(default_factory=CostConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
