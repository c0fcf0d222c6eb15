"""The training engine: a Hugging Face model on Megatron-Core, cut by a Layout, for packed rows of any length."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config.layout import Layout
from hybridflow.config.schema import OptimizerConfig
from hybridflow.config.vocabulary import padded_vocab
from hybridflow.data.batch import Batch, Ragged
from hybridflow.data.units import units_in
from hybridflow.engine import compat, optimizer_files  # noqa: F401  (compat before megatron)
from hybridflow.engine.context import Context
from hybridflow.engine.device import Device
from hybridflow.engine.heads import Head, LanguageHead, ScalarHead
from hybridflow.engine.layers import choose_layers
from hybridflow.engine.loss_types import TokenLoss
from hybridflow.engine.metrics import merge
from hybridflow.engine.micro_batch import MicroBatch, Packer
from hybridflow.engine.model import build_chunks, named_parameters, transformer_config
from hybridflow.engine.offload import HostStorages
from hybridflow.engine.optimizer import Optimizer, wrap_chunks
from hybridflow.engine.packing import assign, costs, least_count
from hybridflow.engine.parallel import init_parallel
from hybridflow.engine.schedule import Consumer, run, scoring_consumer, training_consumer
from hybridflow.engine.vocab_parallel import VocabShard
from hybridflow.errors import DataError, NumericsError, PhaseError
from hybridflow.models.checkpoint import export, load_shards
from hybridflow.models.scalar_head import load_scalar_model
from hybridflow.models.shards import ShardParameter
from hybridflow.models.weight_map import weight_map

from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed


class MegatronEngine:
    """One role's model on this rank. Every method is collective: all ranks of the layout call it in the same order.

    `head`: "lm", or "scalar" for one number per position (critics, reward models). With `optimizer` None the engine only
    evaluates and holds no gradient buffers. `seed`: of a scalar head that the checkpoint lacks. `total_steps`: optimizer steps of the
    run, needed by decaying learning-rate schedules. `transformer_impl`: see layers.choose_layers; `layers` is what was chosen.
    """

    def __init__(
        self,
        hf_config: Any,
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: Device,
        optimizer: OptimizerConfig | None,
        sequence_parallel: bool = False,
        recompute: str = "none",
        seed: int = 1,
        total_steps: int | None = None,
        head: str = "lm",
        transformer_impl: str = "auto",
    ) -> None:
        """Raises ConfigError or ModelError when the model, the layout and the settings do not fit."""
        self.layout, self.device, self.dtype, self.seed = layout, device, dtype, seed
        self.initializer_range = float(getattr(hf_config, "initializer_range", 0.02))
        self.weights = weight_map(hf_config, head)
        self.weights.megatron(layout, 0)  # refuses what does not divide, before groups are made
        self.layers = choose_layers(transformer_impl, device, dtype)
        self.parallel = init_parallel(layout, device)
        settings = self.weights.settings
        self.config = transformer_config(
            settings, self.parallel, device, dtype=dtype, sequence_parallel=sequence_parallel, recompute=recompute, layers=self.layers
        )
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)  # layers look for its RNG states when they are built
        self.chunks: list[torch.nn.Module] = list(build_chunks(settings, self.config, self.parallel, device, head, self.layers))
        self.vocab = VocabShard.of(self.weights.vocab, padded_vocab(self.weights.vocab, layout.tp), self.parallel.groups.tp)
        context = Context(layout.cp, self.parallel.at.cp, self.parallel.groups.cp)
        self.packer = Packer(context, layout.tp if self.config.sequence_parallel else 1, device.torch_device, dtype)
        self.optimizer: Optimizer | None = None
        if optimizer is None:
            for chunk in self.chunks:
                chunk.requires_grad_(False).eval()
        else:
            self.config.finalize_model_grads_func = _finalize
            self.chunks = list(wrap_chunks(self.chunks, self.config, self.parallel))
            self.optimizer = Optimizer(optimizer, self.chunks, self.parallel, device, dtype=dtype, total_steps=total_steps)
        self._loaded = False
        self._offloaded = False
        self._host_weights: HostStorages | None = None

    def load(self, path: str) -> None:
        """Read this rank's slices of a Hugging Face safetensors checkpoint. Raises ModelError when tensors are missing or misshaped.

        A scalar head takes sequence-classification checkpoints of one label, and language models, on which it starts at random.
        """
        shards, tensors = self.shard_parameters(), self.parameters()
        with torch.no_grad():
            if self.weights.head == "scalar":
                load_scalar_model(path, self.weights, shards, tensors, std=self.initializer_range, seed=self.seed)
            else:
                load_shards(path, shards, tensors, expected=self.weights.logical)
        self.weights_changed()

    def export(self, path: str, source: str, complete: Callable[[Path], None] | None = None) -> None:
        """Write the weights as a Hugging Face model like `source`, which gives configuration and tokenizer (collective; complete or
        absent). complete: called on rank 0 with the folder before it takes its name, to add files."""
        self._ready("export")
        export(path, source=source, weights=self.weights, layout=self.layout, tensors=self.parameters(), complete=complete)

    def weights_changed(self) -> None:
        """Tell the engine that `parameters()` were written from outside (load, resume)."""
        if self.optimizer is not None:
            self.optimizer.reload_weights()
        self._loaded = True

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's parameters by Megatron name with global layer numbers: live storage, in the model's dtype."""
        return {name: parameter.data for name, parameter in named_parameters(self.chunks).items()}

    def shard_parameters(self) -> dict[str, ShardParameter]:
        """Which pieces of which logical tensors `parameters()` hold."""
        return self.weights.megatron(self.layout, self.parallel.rank)

    @torch.no_grad()
    def log_probs(self, batch: Batch, *, temperature: float, token_budget: int, entropy: bool) -> Batch:
        """Log-probability of each response token under the present weights.

        batch: rows of this data-parallel rank (the same on its tp and pp ranks; may be empty) with prompt_ids and response_ids.
        Returns `log_prob` and, when asked for, `entropy`: Ragged float32 on the CPU, aligned with response_ids, on every rank.
        """
        self._ready("log_probs", "lm")
        names = ("log_prob", "entropy") if entropy else ("log_prob",)
        found = self._evaluate(batch, self._head(temperature, entropy), [f"{name}_N" for name in names], token_budget)
        lengths = batch["response_ids"].lengths
        return Batch({name: Ragged(values, lengths) for name, values in zip(names, found)})

    @torch.no_grad()
    def values(self, batch: Batch, *, token_budget: int) -> Ragged:
        """The scalar head at the position that predicts each response token (the value of the state before it).

        batch: as for log_probs. Returns float32 on the CPU, aligned with response_ids, on every rank.
        """
        self._ready("values", "scalar")
        return Ragged(self._evaluate(batch, self._head(), ["value_N"], token_budget)[0], batch["response_ids"].lengths)

    @torch.no_grad()
    def scores(self, batch: Batch, *, token_budget: int) -> torch.Tensor:
        """The scalar head at the last token of prompt + response: what Hugging Face's sequence classification reads.

        The end of a row is known by its lengths, not by padding tokens. Returns float32 [B] on the CPU, on every rank.
        """
        self._ready("scores", "scalar")
        return self._evaluate(batch, self._head(), ["score_R"], token_budget)[0]

    def update(
        self, batch: Batch, loss: TokenLoss, *, token_budget: int, temperature: float | None = None, entropy: bool = False
    ) -> dict[str, float]:
        """One optimizer step on a mini-batch.

        batch: rows of this data-parallel rank, with prompt_ids, response_ids and whatever `loss` reads. `temperature` and
        `entropy` are a language-model head's; temperature must then be given. Gradients are sums over tokens, micro-batches and
        ranks. Returns loss, grad_norm (before clipping), lr and the loss function's own metrics, equal on every rank.
        Raises NumericsError on every rank, weights untouched, when the loss or the gradient is not finite.
        """
        optimizer = self._trained("update")
        head = self._head(temperature, entropy)
        micro_batches = self._micro_batches(batch, token_budget, head, columns=True)
        if not micro_batches:
            raise ValueError("no rank has a response token in this mini-batch: there is nothing to learn from")
        self._set_training(True)
        optimizer.zero_grad()
        results = self._run(micro_batches, training_consumer(head, loss), forward_only=False)
        metrics = merge(results, self.parallel)
        norm = optimizer.gradient_norm()
        if not (math.isfinite(metrics["loss"]) and math.isfinite(norm)):
            raise NumericsError(
                f"loss {metrics['loss']}, gradient norm {norm}: the weights were not updated. Look at the loss function's inputs "
                f"(log-probs, advantages) and metrics: {metrics}"
            )
        optimizer.step(norm)
        return {**metrics, "grad_norm": norm, "lr": optimizer.lr}

    def offload_optimizer(self) -> None:
        """Free the gradient buffers and move the optimizer state to host memory; weights stay."""
        if self.optimizer is not None and not self._offloaded:
            self.optimizer.offload()
            self._offloaded = True

    def onload_optimizer(self) -> None:
        """Undo offload_optimizer."""
        if self.optimizer is not None and self._offloaded:
            self.optimizer.onload()
            self._offloaded = False

    def offload_weights(self) -> None:
        """Move the weights to host memory; `parameters()` stay valid objects, and must not be touched until onload_weights."""
        if self._host_weights is None:
            self._host_weights = HostStorages(self.parameters().values())
            self.device.release_cache()

    def onload_weights(self) -> None:
        """Undo offload_weights."""
        if self._host_weights is not None:
            self._host_weights.restore()
            self._host_weights = None

    def optimizer_state(self) -> dict[str, Any]:
        """This rank's optimizer (moments, float32 main weights, place in the schedule) in host memory, fit for torch.save."""
        return self._trained("optimizer_state").state()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Continue from `optimizer_state` of the same rank of the same model and layout; load the weights first.

        Raises ModelError when the state does not fit.
        """
        self._trained("load_optimizer_state").load_state(state)

    def save_optimizer(self, path: str, source: str) -> None:
        """Write the optimizer's state so that an engine of any layout can load it (collective): see optimizer_files.py."""
        optimizer = self._trained("save_optimizer")
        optimizer_files.save(path, source, optimizer, named_parameters(self.chunks), self.weights, self.layout)

    def load_optimizer(self, path: str) -> None:
        """Continue from `save_optimizer` of an engine of the same model in any layout; load the weights first."""
        optimizer = self._trained("load_optimizer")
        optimizer_files.load(path, optimizer, named_parameters(self.chunks), self.shard_parameters(), self.weights)

    def _trained(self, verb: str) -> Optimizer:
        """The optimizer, where the engine is ready and has it here."""
        self._ready(verb)
        if self.optimizer is None:
            raise PhaseError(f"{verb} on an engine without optimizer: it was built for inference only")
        if self._offloaded:
            raise PhaseError(f"{verb} while the optimizer is offloaded; call onload_optimizer first")
        return self.optimizer

    def _ready(self, verb: str, head: str | None = None) -> None:
        if head not in (None, self.weights.head):
            raise ValueError(f"{verb} on an engine with head={self.weights.head!r}: it needs head={head!r}")
        if not self._loaded:
            raise PhaseError(f"{verb} before load: the engine has no weights yet")
        if self._host_weights is not None:
            raise PhaseError(f"{verb} while the weights are offloaded; call onload_weights first")

    def _evaluate(self, batch: Batch, head: Head, fields: list[str], token_budget: int) -> list[torch.Tensor]:
        """Fields of the head's Outputs for the whole batch, on the CPU of every rank: by response token, or by row (`_R`)."""
        sizes = [len(batch) if name.endswith("_R") else int(batch["response_ids"].lengths.sum()) for name in fields]
        found = [torch.zeros(size, dtype=torch.float32, device=self.device.torch_device) for size in sizes]
        micro_batches = self._micro_batches(batch, token_budget, head, columns=False)
        if micro_batches:
            self._set_training(False)
            for micro, outputs in zip(micro_batches, self._run(micro_batches, scoring_consumer(head), forward_only=True)):
                for name, values in zip(fields, found):
                    values[micro.rows_R if name.endswith("_R") else micro.source_N] = getattr(outputs, name)
            for values in found:
                self._from_last_stage(values)
        return [values.cpu() for values in found]

    def _micro_batches(self, batch: Batch, token_budget: int, head: Head, *, columns: bool) -> list[MicroBatch]:
        """The rows in packed micro-batches: as many on every data-parallel rank, since all of them join each gradient sum."""
        if token_budget < 1:
            raise ValueError(f"token budget must be positive, got {token_budget}")
        lengths, units = costs(batch, head.whole), units_in(batch)
        if max(lengths, default=0) > self.weights.longest_sequence:
            raise DataError(f"a sequence of {max(lengths)} input tokens: {self.weights.family} models with this config.json take "
                            f"{self.weights.longest_sequence} (positions, or sliding window); shorten prompts or responses")
        count = torch.tensor(least_count(lengths, token_budget, units), device=self.device.torch_device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.parallel.groups.dp_cp)
        multiple = self.layout.pp if self.layout.vpp > 1 else 1  # the interleaved schedule takes whole rounds of stages
        total = math.ceil(int(count) / multiple) * multiple
        return [self.packer(batch, rows, whole=head.whole, columns=columns) for rows in assign(lengths, token_budget, total, units)]

    def _head(self, temperature: float | None = None, entropy: bool = False) -> Head:
        parallel = self.config.sequence_parallel, self.parallel.groups.tp, self.packer.context
        if self.weights.head == "scalar":
            if temperature is not None or entropy:
                raise ValueError(f"temperature={temperature}, entropy={entropy}: a scalar head has neither; leave them out")
            return ScalarHead(*parallel)
        if temperature is None:
            raise ValueError("update of a language model needs the temperature its responses were sampled with")
        return LanguageHead(self.vocab, temperature, entropy, *parallel)

    def _run(self, micro_batches: list[MicroBatch], consume: Consumer, *, forward_only: bool) -> list[Any]:
        return run(self.chunks, self.config, self.parallel, micro_batches, consume, forward_only=forward_only)

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            if chunk.training != training:  # it visits every module
                chunk.train(training)

    def _from_last_stage(self, values: torch.Tensor) -> None:
        group = self.parallel.groups.pp
        if group.size() > 1:
            dist.broadcast(values, dist.get_global_rank(group, group.size() - 1), group=group)


def _finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's gradient reductions without its division by the number of tokens: denominators are in the loss already."""
    finalize_model_grads(model, None, **kwargs)
