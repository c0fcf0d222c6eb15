"""Everything that reaches inside vLLM (0.25.1 on GPU, 0.32.0 on CPU). Importing this module imports vLLM.

vLLM runs inside the training processes: one engine per rank, the ranks of a generation group in lock-step, each deciding
the same schedule from the same requests. Its weights are never read from a file: they start as zeros or as the trainer's own
tensors (loader.py), and resharding writes them in place. No global function of vLLM is replaced; its group variables are
filled before its worker would.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine must run in this process, where the weights are
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about choices made here on purpose
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import vllm.distributed.parallel_state as parallel_state  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.usage.usage_lib import UsageContext  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from hybridflow.errors import ConfigError, ModelError, ReshardError  # noqa: E402
from hybridflow.rollout.loader import LOAD_FORMAT, Offer, offering  # noqa: E402
from hybridflow.rollout.requests import FinishReason, Request, Response, Sampling  # noqa: E402
from hybridflow.rollout.weights import ModelWeights  # noqa: E402

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

logger = logging.getLogger(__name__)
warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)  # vLLM calls by older names

PROGRESS_SECONDS = 30.0
# vLLM reserves nothing by this share once the cache size is given; it only checks that so much is free at the start.
MEMORY_SHARE = 0.05


@dataclass(frozen=True)
class EngineSettings:
    """What the engine is built from. groups: global ranks of every generation group, in tensor-parallel order."""

    model_path: str
    groups: tuple[tuple[int, ...], ...]
    rank: int
    local_rank: int
    dtype: str
    seed: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    enforce_eager: bool
    expert_parallel: bool = False  # whole experts are dealt to the ranks of a replica, instead of a part of each
    tokenizer_path: str | None = None  # None: no tokenizer is loaded (no stop strings)
    sleeps: bool = True  # gives its memory back between generations (never on CPU)
    load_format: str = LOAD_FORMAT  # "auto": vLLM reads the weights of the model folder, and nobody may write them


class HybridWorker(BaseWorker):
    """vLLM's worker with our groups of ranks."""

    def init_device(self) -> None:
        set_num_threads = torch.set_num_threads
        if current_platform.is_cpu():
            _name_shared_memory()
        else:
            torch.accelerator.set_device_index(self.local_rank)
        self._make_groups(current_platform.dist_backend)
        super().init_device()
        torch.set_num_threads = set_num_threads  # the CPU worker replaces it by one that does nothing, for the whole process

    def _make_groups(self, backend: str) -> None:
        groups = [list(group) for group in self.vllm_config.additional_config["groups"]]
        if any(group != sorted(group) for group in groups):
            raise ValueError(f"ranks of a generation group must ascend, got {groups}: torch.distributed would reorder them silently")
        singles = [[rank] for rank in range(dist.get_world_size())]
        config = self.parallel_config
        parallel_state.set_custom_all_reduce(not config.disable_custom_all_reduce)
        parallel_state.init_distributed_environment(config.world_size, self.rank, "env://", self.local_rank, backend)
        make = parallel_state.init_model_parallel_group
        parallel_state._TP = make(groups, self.local_rank, backend, use_message_queue_broadcaster=True, group_name="tp")
        parallel_state._EP = parallel_state._TP  # experts are dealt to the ranks of a replica, or each is cut over them
        if hasattr(parallel_state, "_ETP"):  # 0.32
            parallel_state._ETP = parallel_state._TP
        parallel_state._DCP = make(singles, self.local_rank, backend, use_message_queue_broadcaster=True, group_name="dcp")
        parallel_state._PCP = make(singles, self.local_rank, backend, group_name="pcp")
        parallel_state._PP = make(singles, self.local_rank, backend, group_name="pp")
        parallel_state._DP = make(singles, self.local_rank, backend, group_name="dp")


GROUPS = tuple(name for name in ("_TP", "_EP", "_ETP", "_DCP", "_PCP", "_PP", "_DP") if hasattr(parallel_state, name))  # no _ETP in 0.25
WORKER = f"{HybridWorker.__module__}.{HybridWorker.__qualname__}"


def _name_shared_memory() -> None:
    """A name for /dev/shm that all ranks share and no other job has: vLLM's own is the same for every job on a host."""
    box = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(box, 0)
    os.environ["VLLM_DIST_IDENT"] = box[0]


class VllmBridge:
    """One vLLM engine inside this rank. Construction is collective over all ranks of torch.distributed.

    shared: tensors of the trainer, by vLLM name, that are to be vLLM's parameters; `offer` says which became that.
    """

    def __init__(self, settings: EngineSettings, shared: Mapping[str, torch.Tensor]) -> None:
        os.environ.update(RANK=str(settings.rank), LOCAL_RANK=str(settings.local_rank))  # where external_launcher reads them
        self.settings = settings
        self.can_sleep = settings.sleeps and not current_platform.is_cpu()
        if settings.expert_parallel and current_platform.is_cpu():
            raise ConfigError(f"rollout.ep={len(settings.groups[0])}: vLLM's CPU kernel needs a part of every expert on each rank; use 1")
        self.offer = Offer(shared)
        with offering(self.offer):
            self.engine = self._build()
        model = self.engine.model_executor.driver_worker.worker.model_runner.get_model()
        self.weights = ModelWeights(model, self.engine.model_config.dtype)
        self.offer.check(self.parameters())
        self._groups = {name: getattr(parallel_state, name) for name in GROUPS}
        self._count = 0
        self._check_head_size()

    def _build(self) -> LLMEngine:
        try:
            return LLMEngine.from_engine_args(_engine_args(self.settings, self.can_sleep), usage_context=UsageContext.LLM_CLASS)
        except NotImplementedError as error:  # no kernel for the sizes of the model's experts
            raise ModelError(f"vLLM cannot run {self.settings.model_path} on this device: {error}") from error

    def parameters(self) -> dict[str, torch.Tensor]:
        """vLLM's name -> live tensor of this rank (weights.py); after writing them call `weights_written`."""
        return self.weights.named()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        """Answer all requests, in their order. Every rank of a group must pass the same requests (see `same_in_group`)."""
        finished = self._answer([(request.prompt_ids, _sampling_params(request, sampling)) for request in requests])
        return [_response(output.outputs[0]) for output in finished]

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-prob of every token but the first of each row, given the tokens before it, at temperature 1."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True,
                                output_kind=RequestOutputKind.FINAL_ONLY)
        finished = self._answer([(row, params) for row in rows])
        return [[place[token].logprob for token, place in zip(row[1:], output.prompt_logprobs[1:])]
                for row, output in zip(rows, finished)]

    def same_in_group(self, digest: int) -> bool:
        """Whether all ranks of this rank's generation group pass the same number."""
        group = self._groups["_TP"]
        if group.world_size == 1:
            return True
        span = torch.tensor([digest, -digest], dtype=torch.int64)
        dist.all_reduce(span, dist.ReduceOp.MAX, group=group.cpu_group)
        return int(span[0]) == -int(span[1])

    def weights_written(self) -> None:
        """Make anew what vLLM derives from weights, and forget keys and values of earlier ones.

        Raises ReshardError if CUDA graphs would read weights where they no longer are.
        """
        self.weights.derive()
        moved = [] if self.engine.model_config.enforce_eager else self.offer.moved(self.parameters())
        if moved:
            raise ReshardError(f"the trainer has moved {len(moved)} weights that CUDA graphs of the engine read, {moved[0]} first; set "
                               "rollout.alias_weights=off, or rollout.enforce_eager=true")
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: requests are still running")

    def sleep(self) -> None:
        """Free weights and cache (level 2: nothing is kept); nothing where it does not sleep."""
        if self.can_sleep:
            self.engine.sleep(level=2)

    def wake(self, tag: str) -> None:
        """Take memory back, `weights` first, then `kv_cache`, at the same addresses as before; nothing where it does not sleep."""
        if self.can_sleep:
            self.engine.wake_up(tags=[tag])

    def _check_head_size(self) -> None:
        """vLLM's CPU attention knows some head sizes only, and says so no earlier than at the first token."""
        if not current_platform.is_cpu():
            return
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

        backend = CPUMLABackend if self.engine.model_config.use_mla else CPUAttentionBackend
        size, known = self.engine.model_config.get_head_size(), backend.get_supported_head_sizes()
        if size not in known:
            raise ModelError(f"attention head size {size} of {self.settings.model_path}: vLLM on CPU computes only {known}")

    def _answer(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Any]:
        """vLLM's outputs for (token ids, parameters), in order."""
        for name, group in self._groups.items():  # another engine of this process may have set its own
            setattr(parallel_state, name, group)
        with _eager_kernels():
            ids = [self._add(*request) for request in requests]
            finished = self._drain(len(ids))
        return [finished[i] for i in ids]

    def _add(self, token_ids: list[int], params: SamplingParams) -> str:
        self._count += 1
        name = str(self._count)
        self.engine.add_request(name, {"type": "token", "prompt_token_ids": token_ids}, params)
        return name

    def _drain(self, total: int) -> dict[str, Any]:
        finished: dict[str, Any] = {}
        start = noted = time.monotonic()
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    finished[output.request_id] = output
            if time.monotonic() - noted > PROGRESS_SECONDS:
                noted = time.monotonic()
                logger.info("generating: %d of %d responses after %.0f s", len(finished), total, noted - start)
        return finished


def _engine_args(settings: EngineSettings, can_sleep: bool) -> EngineArgs:
    tp, cpu = len(settings.groups[0]), current_platform.is_cpu()
    # A prompt prefilled in parts draws a random number for each part and takes it back, which CPU generators cannot: a seeded
    # request then fails. On CPU every prompt is prefilled whole, and a step has room for the longest.
    batched_tokens = max(settings.max_num_batched_tokens, settings.max_num_seqs, settings.max_model_len if cpu else 0)
    return EngineArgs(
        model=settings.model_path, tokenizer=settings.tokenizer_path, skip_tokenizer_init=settings.tokenizer_path is None,
        dtype=settings.dtype, seed=settings.seed, max_model_len=settings.max_model_len, load_format=settings.load_format,
        generation_config="vllm",  # the model folder's sampling defaults (top_p, ...) must not leak in
        distributed_executor_backend="external_launcher", tensor_parallel_size=tp, worker_cls=WORKER,
        additional_config={"groups": [list(group) for group in settings.groups]},
        kv_cache_memory_bytes=settings.kv_cache_bytes, gpu_memory_utilization=MEMORY_SHARE,
        max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=batched_tokens, enable_chunked_prefill=not cpu,
        enforce_eager=settings.enforce_eager or cpu,  # compiling on CPU costs more than it gives
        # Tensor-parallel ranks schedule for themselves; only the synchronous scheduler is sure to decide alike on all.
        async_scheduling=tp == 1 and not cpu,
        enable_expert_parallel=settings.expert_parallel, moe_backend="auto" if cpu else "triton",  # see weights.py
        enable_prefix_caching=True, enable_sleep_mode=can_sleep, logprobs_mode="processed_logprobs", disable_log_stats=True)


def _sampling_params(request: Request, sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=request.seed,
        max_tokens=sampling.max_tokens, logprobs=0, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY,
        # Stop ids are ours (rollout/stops.py), so that both releases stop alike.
        ignore_eos=True, stop_token_ids=list(sampling.stop_token_ids), stop=list(sampling.stop), detokenize=bool(sampling.stop))


def _response(output: Any) -> Response:
    reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    if output.finish_reason not in reasons:
        raise RuntimeError(f"vLLM ended a response with reason {output.finish_reason!r}")
    return Response(list(output.token_ids), output.logprobs.logprobs, reasons[output.finish_reason])


@contextmanager
def _eager_kernels() -> Iterator[None]:
    """On CPU, run vLLM's small torch.compile'd sampler functions eagerly: compiling them takes 15 s at the first call."""
    if not current_platform.is_cpu():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
