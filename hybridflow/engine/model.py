"""A Megatron GPT model for packed sequences: configuration, layer spec, chunks of this rank, and their global names."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hybridflow.config.layout import Layout, stage_layers
from hybridflow.config.vocabulary import padded_vocab
from hybridflow.engine import compat  # noqa: F401  (before megatron)
from hybridflow.engine.attention import Packing
from hybridflow.engine.device import Device
from hybridflow.engine.layers import TRANSFORMER_ENGINE, block_spec
from hybridflow.engine.parallel import Parallel
from hybridflow.engine.rotary import Rotary
from hybridflow.errors import ConfigError
from hybridflow.models.settings import MegatronSettings

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

logging.getLogger("megatron").setLevel(logging.ERROR)


class ScalarWeight(torch.nn.Module):
    """The parameter of a scalar head: weight [1, H], whole on every tensor-parallel rank (used by heads.ScalarHead)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # each rank then sees its part of the tokens: gradients are added


class PackedGPTModel(GPTModel):
    """GPTModel that takes packed tokens [1, T] with a Packing and ends with hidden states, not logits.

    Logits of all tokens over the whole vocabulary would be the largest tensor of the step, and only those of response
    tokens are needed: the schedule asks for `head_weight` and computes them in chunks (vocab_parallel.py).
    `head` "scalar" has a ScalarWeight in place of the output layer. rotates: whether attention turns queries and keys itself.
    """

    def __init__(self, *, head: str, rotary: Rotary, rotates: bool, config: TransformerConfig, **arguments: Any) -> None:
        super().__init__(config=config, **arguments)
        self.rotary, self.rotates = rotary, rotates
        self.score: ScalarWeight | None = None
        if head == "scalar" and self.post_process:
            del self.output_layer  # GPTModel cannot be built without one
            self.score = ScalarWeight(config)

    def _preprocess(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *_: Any, packed_seq_params: Packing, **__: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        if not self.rotates:
            return embedded, self.rotary.angles(position_ids[0]), None, None, None, None
        packed_seq_params.positions_T, packed_seq_params.rotary = position_ids[0], self.rotary
        return embedded, None, None, None, None, None

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    @property
    def head_weight(self) -> torch.Tensor:
        """The language-model head's shard [V / tp, H] or the scalar head [1, H]; only where post_process."""
        if self.score is not None:
            return self.score.weight
        return self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else self.output_layer.weight


def transformer_config(
    settings: MegatronSettings, parallel: Parallel, device: Device, *, dtype: torch.dtype, sequence_parallel: bool, recompute: str,
    layers: str,
) -> TransformerConfig:
    """Megatron's configuration of the model on this layout. Raises ConfigError for what the engine cannot do."""
    layout = parallel.layout
    if settings.activation != "silu":
        raise ConfigError(f"activation {settings.activation!r} is not supported by the Megatron engine")
    if recompute not in RECOMPUTE:
        raise ConfigError(f"actor.recompute={recompute!r} is none of {', '.join(RECOMPUTE)}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"model.dtype {dtype} is not supported by the Megatron engine; use bfloat16 or float32")
    if settings.experts is not None and layout.tp > 1 and not sequence_parallel:
        raise ConfigError(
            f"parallel.tp={layout.tp} with experts needs parallel.sequence_parallel=true: otherwise every tensor-parallel rank "
            "would send the same tokens to the experts"
        )
    return TransformerConfig(
        **settings.transformer,
        **RECOMPUTE[recompute],
        **_stages(settings.transformer["num_layers"], layout),
        activation_func=F.silu,
        use_te_activation_func=True,  # "the module of the layer's spec": activation.SwiGLU (layers.py)
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Weights are always loaded. The initialisation still runs, as it is what marks parameters as tensor parallel.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        use_cpu_initialization=not device.is_cuda,
        # Losses are sums with their denominators inside: no scaling by ranks or micro-batches anywhere.
        calculate_per_token_loss=True,
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it even in a dense model
        deallocate_pipeline_outputs=layout.pp > 1,
        # Fusions that need apex, or compile at run time.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        # Its kernel for unpacked rows takes an angle for every token, which is how positions are given here.
        apply_rope_fusion=layers == TRANSFORMER_ENGINE,
        moe_grouped_gemm=layers == TRANSFORMER_ENGINE and settings.experts is not None,
    )


def _stages(layers: int, layout: Layout) -> dict[str, Any]:
    """The pipeline's stages as the weight map has them (stage_layers), in Megatron's terms."""
    if layout.pp == 1:
        return {}
    stages = stage_layers(layers, layout.pp, layout.vpp)
    chunks = [["decoder"] * len(stages[p][v]) for v in range(layout.vpp) for p in range(layout.pp)]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    arguments: dict[str, Any] = {"pipeline_model_parallel_layout": chunks}
    if layout.vpp > 1:
        arguments |= {"virtual_pipeline_model_parallel_size": layout.vpp, "overlap_p2p_comm": True, "batch_p2p_comm": False}
    return arguments


def build_chunks(
    settings: MegatronSettings, config: TransformerConfig, parallel: Parallel, device: Device, head: str, layers: str
) -> list[PackedGPTModel]:
    """The model chunks of this rank (one, or vpp of them), on the device, weights not loaded. `layers`: a choice of layers.py.

    No Float16Module around them: parameters have the dtype already, and its float32 copy of the output is not wanted.
    """
    layout = parallel.layout
    arguments = {**settings.gpt, "vocab_size": padded_vocab(settings.gpt["vocab_size"], layout.tp)}
    chunks = []
    for chunk in range(layout.vpp):
        virtual = chunk if layout.vpp > 1 else None
        model = PackedGPTModel(
            head=head,
            rotary=Rotary(settings.inverse_frequencies, settings.rotary_scale, config.params_dtype, device.torch_device),
            # Transformer Engine's kernel turns them from angles; it knows nothing of latent attention.
            rotates=settings.latent is not None or not config.apply_rope_fusion,
            config=config,
            transformer_layer_spec=block_spec(config, settings, virtual, layers),
            pre_process=parallel.first_stage and chunk == 0,
            post_process=parallel.last_stage and chunk == layout.vpp - 1,
            parallel_output=True,
            pg_collection=parallel.groups,
            vp_stage=virtual,
            **arguments,
        )
        chunks.append(model.to(device.torch_device))
    return chunks


def unwrap(chunk: torch.nn.Module) -> PackedGPTModel:
    while not isinstance(chunk, PackedGPTModel):
        chunk = chunk.module
    return chunk


# Transformer Engine's linear layer with a norm in front of it holds the norm's weight; the weight map knows it by the norm's name.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<layer>linear_fc[12])\.weight")
GROUPED_EXPERT = re.compile(r"mlp\.experts\.(?P<layer>linear_fc[12])\.weight(?P<expert>\d+)")  # of Transformer Engine


def named_parameters(chunks: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters of this rank, and a router's expert bias, by the weight map's name, whatever the layers are made of.

    Layers and experts are numbered within the model, from 0.
    """
    found: dict[str, torch.Tensor] = {}
    for chunk in map(unwrap, chunks):
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".router.expert_bias"))
        for name, parameter in (*chunk.named_parameters(), *biases):
            found[_global_name(chunk, name)] = parameter
    return found


def _global_name(chunk: PackedGPTModel, name: str) -> str:
    if not name.startswith("decoder.layers."):
        return name
    local, rest = name.removeprefix("decoder.layers.").split(".", 1)
    layer = chunk.decoder.layers[int(local)]  # Megatron numbers layers within a chunk
    experts = layer.mlp.local_expert_indices if hasattr(layer.mlp, "local_expert_indices") else ()
    return f"decoder.layers.{layer.layer_number - 1}.{weight_map_name(rest, experts)}"


def weight_map_name(name: str, experts: Sequence[int]) -> str:
    """The weight map's name of a layer's parameter. `experts`: numbers of this rank's experts, which modules count from 0."""
    match = EXPERT.fullmatch(name) or GROUPED_EXPERT.fullmatch(name)
    if match:
        return f"mlp.experts.local_experts.{experts[int(match['expert'])]}.{match['layer']}.weight"
    return FUSED_NORMS.get(name, name)
