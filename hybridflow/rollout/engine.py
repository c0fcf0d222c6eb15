"""RolloutEngine: this rank's share of a generation replica, with weights from the trainer and a version on them.

    engine = RolloutEngine(model_path, generation, config, dtype="bfloat16", device=device, seed=1, max_model_len=2048)
    engine.wake_weights(); resharder.run(); engine.set_version(7); engine.wake_kv()
    responses = engine.generate(prompts, step=7, n=8, temperature=1.0, seed=1, version=7)
    engine.sleep()

Legend: P prompts, B = P n responses.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hybridflow.config.batch_rules import GIB
from hybridflow.config.layout import GenerationLayout
from hybridflow.config.schema import RolloutConfig
from hybridflow.data.batch import Batch, Ragged
from hybridflow.errors import ConfigError, DataError, PhaseError
from hybridflow.reshard.phases import HybridPhase, Phase
from hybridflow.rollout.requests import Request, Response, Sampling, request_seed
from hybridflow.rollout.rng import preserved_rng
from hybridflow.rollout.stops import stop_token_ids

if TYPE_CHECKING:
    from hybridflow.engine.device import Device

logger = logging.getLogger(__name__)


class RolloutEngine:
    """Generates responses with vLLM inside a training rank.

    model_path: Hugging Face folder, of which only the configuration is read (and the tokenizer, if there are stop strings).
    generation: the replica and tensor-parallel rank of every global rank. dtype: "bfloat16" or "float32". max_model_len:
    tokens of prompt and response together. Construction is collective over all ranks; the engine then sleeps, in phase
    train, with weights that mean nothing: sync before generating. Keep it for the life of the process, since vLLM destroys
    the default process group with it. shared: tensors of the trainer, by vLLM name, that vLLM's parameters shall be; they must
    stay where they are. sleeps: whether it gives its memory back while it does not generate.
    """

    def __init__(self, model_path: str, generation: GenerationLayout, config: RolloutConfig, *, dtype: str, device: Device, seed: int,
                 max_model_len: int, tokenizer_path: str | None = None, shared: Mapping[str, torch.Tensor] | None = None,
                 sleeps: bool = True) -> None:
        from hybridflow.rollout.bridge import EngineSettings, VllmBridge  # vLLM takes seconds to import

        if config.max_response_length >= max_model_len:
            raise ConfigError(f"rollout.max_response_length={config.max_response_length} leaves no room for a prompt in "
                              f"max_model_len={max_model_len}; the model context must hold prompt and response")
        self.config, self.generation, self.max_model_len = config, generation, max_model_len
        self.phase = HybridPhase()
        self.rank = dist.get_rank()
        self.replica, self.tp_rank = generation.position(self.rank)
        self._stop_ids = stop_token_ids(model_path, config)
        start = time.perf_counter()
        with preserved_rng():
            self._bridge = VllmBridge(EngineSettings(
                model_path=model_path, groups=generation.groups, rank=self.rank, local_rank=device.index, dtype=dtype, seed=seed,
                max_model_len=max_model_len, max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                kv_cache_bytes=int(config.kv_cache_gib * GIB), enforce_eager=config.enforce_eager, expert_parallel=generation.ep > 1,
                tokenizer_path=(tokenizer_path or model_path) if config.stop else None, sleeps=sleeps), shared or {})
        self._bridge.sleep()
        logger.info("generation engine up in %.1f s (replica %d, tensor-parallel rank %d)", time.perf_counter() - start, self.replica,
                    self.tp_rank)

    @property
    def version(self) -> int | None:
        """Version of the weights, None while they are not the trainer's."""
        return self.phase.version

    def parameters(self) -> dict[str, torch.Tensor]:
        """vLLM name -> live tensor of this rank. Write them only in phase sync."""
        return self._bridge.parameters()

    @property
    def unshared(self) -> dict[str, str]:
        """Why parameters that were to be the trainer's tensors are not."""
        return dict(self._bridge.offer.refused)

    def bytes_to_wake(self) -> dict[str, int]:
        """Device bytes that waking takes, by tag: weights that are not the trainer's, and the cache."""
        own = {name: tensor for name, tensor in self.parameters().items() if name not in self._bridge.offer.taken}
        return {"weights": sum(t.nbytes for t in own.values()), "kv_cache": int(self.config.kv_cache_gib * GIB)}

    def sleep(self) -> None:
        """generate -> train: give weights and cache memory back, where the engine sleeps."""
        self.phase.begin_train()
        self._bridge.sleep()

    def wake_weights(self) -> None:
        """train -> sync: the weights have memory again, for resharding to fill."""
        self.phase.begin_sync()
        self._bridge.wake("weights")

    def set_version(self, version: int) -> None:
        """The weights are now the trainer's `version`. Keys and values of earlier weights are forgotten."""
        self.phase.synced(version)
        self._bridge.weights_written()

    def wake_kv(self) -> None:
        """sync -> generate."""
        self.phase.begin_generate()
        self._bridge.wake("kv_cache")

    def generate(self, prompts: Batch, *, step: int, n: int, temperature: float, seed: int, version: int) -> Batch:
        """Sample n responses to each prompt.

        prompts: rows of this replica, the same on all its tensor-parallel ranks: prompt_id int64 [P], prompt_ids Ragged int64,
        and any other columns, which are repeated into the result. A response depends on (seed, step, prompt_id, sample_index)
        and the weights alone.

        Returns B rows, prompt-major: prompt_id, sample_index, prompt_ids, response_ids (with the stop token), rollout_log_prob
        (Ragged float32, of each response token at `temperature`; greedy: at 1), prompt_length, response_length, finish_reason,
        weight_version.

        Raises PhaseError in a wrong phase, for another version, or if the ranks of a replica got different prompts; DataError
        for an empty prompt or one that leaves no room for max_response_length.
        """
        self.phase.expect(Phase.GENERATE, "generate")
        self.phase.expect_version(version, "generate")
        rows = [ids.tolist() for ids in prompts["prompt_ids"].rows()]
        names = prompts["prompt_id"].tolist()
        self._check_prompts(rows, names)
        requests = [Request(ids, request_seed(seed, step, name, k)) for ids, name in zip(rows, names) for k in range(n)]
        self._check_lock_step(requests)
        with preserved_rng():
            responses = self._bridge.generate(requests, self._sampling(temperature))
        return _collect(prompts, n, responses, version)

    def score(self, rows: Sequence[list[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of every token but the first of each row, given those before it (nothing is sampled).

        Collective over the replica, whose ranks pass the same rows. Raises PhaseError outside phase generate.
        """
        self.phase.expect(Phase.GENERATE, "score")
        with preserved_rng():
            return self._bridge.score(rows)

    def _sampling(self, temperature: float) -> Sampling:
        return Sampling(temperature=temperature, top_p=self.config.top_p, top_k=self.config.top_k,
                        max_tokens=self.config.max_response_length, stop_token_ids=self._stop_ids, stop=tuple(self.config.stop))

    def _check_prompts(self, rows: list[list[int]], names: list[int]) -> None:
        room = self.max_model_len - self.config.max_response_length
        empty = [name for name, ids in zip(names, rows) if not ids]
        if empty:
            raise DataError(f"prompts {empty[:10]} (prompt_id) are empty; the model needs at least one token to start from")
        long = [f"{name}: {len(ids)} tokens" for name, ids in zip(names, rows) if len(ids) > room]
        if long:
            raise DataError(f"prompts longer than {room} tokens (context {self.max_model_len} - rollout.max_response_length "
                            f"{self.config.max_response_length}), by prompt_id: {', '.join(long[:10])}; lower data.max_prompt_length or "
                            "rollout.max_response_length")

    def _check_lock_step(self, requests: list[Request]) -> None:
        """Ranks of a replica that decode different requests would not fail but return wrong tokens."""
        digest = zlib.crc32(repr([(r.seed, r.prompt_ids) for r in requests]).encode()) if self.generation.tp > 1 else 0
        if not self._bridge.same_in_group(digest):
            raise PhaseError(f"the ranks {self.generation.groups[self.replica]} of generation replica {self.replica} were given different "
                             "prompts, seeds or steps; all tensor-parallel ranks of a replica must get the same")


def _collect(prompts: Batch, n: int, responses: list[Response], version: int) -> Batch:
    repeated = prompts.select(torch.arange(len(prompts)).repeat_interleave(n))
    count = len(responses)
    response_ids = Ragged.from_rows([r.token_ids for r in responses], dtype=torch.int64)
    return repeated.with_columns(
        sample_index=torch.arange(n).repeat(len(prompts)),
        response_ids=response_ids,
        rollout_log_prob=Ragged.from_rows([r.log_probs for r in responses], dtype=torch.float32),
        prompt_length=repeated["prompt_ids"].lengths,
        response_length=response_ids.lengths,
        finish_reason=torch.tensor([int(r.finish_reason) for r in responses], dtype=torch.int64),
        weight_version=torch.full((count,), version, dtype=torch.int64))
