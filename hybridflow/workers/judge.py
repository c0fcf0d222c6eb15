"""The judge role: a language model that reads prompt and response and writes a verdict, of which a score is taken.

A vLLM engine in processes of its own, with weights that vLLM reads itself and that never change.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.batch_rules import GIB
from hybridflow.config.reward_models import JudgeConfig, Scorer
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch
from hybridflow.data.chat import Messages, encode_chats, encode_texts, render_chat
from hybridflow.data.decode import decode_rows
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engine.device import Device
from hybridflow.rewards.verdict import chat_text, question, verdict_score
from hybridflow.rollout.requests import Request, Sampling, request_seed
from hybridflow.rollout.stops import eos_token_ids

logger = logging.getLogger(__name__)


class JudgeWorker:
    """Scores with one language model; tensor-parallel ranks of its layout form one engine."""

    def __init__(self, context: WorkerContext, config: Config, scorer: Scorer) -> None:
        self.column, self.place, self.seed = scorer.column, scorer.section, config.trainer.seed
        self.judge: JudgeConfig = scorer.settings
        self.tokenizer = load_tokenizer(self.judge.model, f"{self.place}.model")
        self.actor_tokenizer = load_tokenizer(config.actor.model)
        self.sampling = Sampling(temperature=self.judge.temperature, top_p=1.0, top_k=-1, max_tokens=self.judge.max_response_length,
                                 stop_token_ids=tuple(eos_token_ids(self.judge.model.path)))
        self.bridge = _engine(context, self.judge, config.trainer.seed)

    @register(Protocol.DP)
    def compute_score(self, batch: Batch, *, texts: dict[int, str], chats: dict[int, Messages],
                      columns: dict[int, dict[str, Any]]) -> tuple[Batch, dict[str, float]]:
        """Adds the scorer's column, float32 [B], and <column>/verdict (text); beside it the numbers of `unparsed` verdicts, and among
        them of `too_long` questions.

        By prompt_id: texts of plain prompts, chats of the others, and the data columns that the question names.
        """
        ids = batch["prompt_id"].tolist()
        responses = decode_rows(self.actor_tokenizer, batch["response_ids"])
        prompts = texts | {i: chat_text(messages) for i, messages in chats.items()}
        asked = self._tokens([question(self.judge, prompts[i], response, columns[i], self.place) for i, response in zip(ids, responses)])
        fits = [row for row, tokens in enumerate(asked) if len(tokens) <= self.judge.max_prompt_length]
        seeds = self._seeds(batch)
        answers = self.bridge.generate([Request(asked[row], seeds[row]) for row in fits], self.sampling)
        verdicts = [""] * len(ids)
        for row, answer in zip(fits, answers):
            verdicts[row] = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        return self._scored(verdicts, len(ids) - len(fits))

    def _scored(self, verdicts: list[str], too_long: int) -> tuple[Batch, dict[str, float]]:
        scores = [verdict_score(self.judge, verdict) for verdict in verdicts]
        unparsed = [row for row, score in enumerate(scores) if score is None]
        if unparsed:
            logger.warning("%s: %d of %d verdicts hold no score, the first: %r", self.place, len(unparsed), len(verdicts),
                           verdicts[unparsed[0]][-200:])
        values = [self.judge.unparsed_reward if score is None else score for score in scores]
        return (Batch({self.column: torch.tensor(values, dtype=torch.float32), f"{self.column}/verdict": verdicts}),
                {"unparsed": float(len(unparsed)), "too_long": float(too_long)})

    def _tokens(self, questions: list[str]) -> list[list[int]]:
        if self.tokenizer.chat_template is None:
            return encode_texts(self.tokenizer, questions)
        chats = [render_chat(self.tokenizer, [{"role": "user", "content": text}], self.place) for text in questions]
        return encode_chats(self.tokenizer, chats)

    def _seeds(self, batch: Batch) -> list[int]:
        names = zip(batch["weight_version"].tolist(), batch["prompt_id"].tolist(), batch["sample_index"].tolist())
        return [request_seed(self.seed, *name) for name in names]


def _engine(context: WorkerContext, judge: JudgeConfig, seed: int) -> Any:
    from hybridflow.rollout.bridge import EngineSettings, VllmBridge  # vLLM takes seconds to import

    tp = context.layout.tp
    groups = tuple(tuple(range(first, first + tp)) for first in range(0, context.world, tp))
    return VllmBridge(EngineSettings(
        model_path=judge.model.path, groups=groups, rank=context.rank, local_rank=Device.detect(context.device_name).index,
        dtype=judge.model.dtype, seed=seed, max_model_len=judge.max_prompt_length + judge.max_response_length,
        max_num_seqs=judge.max_num_seqs, max_num_batched_tokens=judge.max_num_batched_tokens,
        kv_cache_bytes=int(judge.kv_cache_gib * GIB), enforce_eager=False, load_format="auto"), shared={})
