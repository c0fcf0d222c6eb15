"""The reward-model role, which is also that of cost models: a sequence-classification checkpoint in Megatron that gives each response
one score."""

from __future__ import annotations

from hybridflow.cluster.context import WorkerContext
from hybridflow.cluster.protocols import Protocol, register
from hybridflow.config.model_facts import read_model_facts
from hybridflow.config.reward_models import Scorer
from hybridflow.config.schema import Config
from hybridflow.data.batch import Batch
from hybridflow.data.chat import Messages
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ModelError, NumericsError
from hybridflow.models.scalar_head import SCORE
from hybridflow.models.tensor_files import describe
from hybridflow.rewards.scored_text import ScoredText
from hybridflow.workers.build import build_engine


class RewardModelWorker:
    """Scores with one frozen model of rewards or costs, in its own layout, tokenizer and chat template."""

    def __init__(self, context: WorkerContext, config: Config, scorer: Scorer) -> None:
        self.column, self.place, self.settings = scorer.column, scorer.section, scorer.settings
        path = self.settings.model.path
        if SCORE not in describe(path):
            raise ModelError(f"{self.place}.model.path={path} has no {SCORE}: it is no sequence-classification checkpoint, and a random "
                             "head would score noise; train one with algorithm=reward_model, or use a *ForSequenceClassification model")
        self.text = ScoredText(load_tokenizer(self.settings.model, f"{self.place}.model"), load_tokenizer(config.actor.model),
                               read_model_facts(path, f"{self.place}.model.path").longest_sequence, self.place)
        self.engine = build_engine(context, self.settings, config, head="scalar")
        self.idle_on_host = self.settings.offload and context.device_name == "cuda"  # without a GPU they are there anyway
        self._sleep()

    @register(Protocol.ONE_TO_ALL)
    def reads_text(self) -> bool:
        """False where it reads the actor's tokens: prompts need not be sent as text then."""
        return not self.text.same

    @register(Protocol.DP)
    def compute_score(self, batch: Batch, *, texts: dict[int, str], chats: dict[int, Messages]) -> tuple[Batch, dict[str, float]]:
        """Adds the scorer's column, float32 [B]; beside it `cut`, the responses whose text was longer than the model's context.

        texts, chats: by prompt_id the text of every prompt and the messages of those that have some, for a model with another
        tokenizer than the actor's. Raises NumericsError when a score is not finite.
        """
        rows, cut = self.text.rows(batch, texts, chats)
        self.engine.onload_weights()
        score = self.engine.scores(rows, token_budget=self.settings.score_max_tokens_per_micro_batch)
        self._sleep()
        if not bool(score.isfinite().all()):
            raise NumericsError(f"{self.place} gave {int((~score.isfinite()).sum())} of {len(score)} responses a score that is not finite; "
                                f"look at {self.place}.model.dtype={self.settings.model.dtype} and at the checkpoint")
        return Batch({self.column: score}), {"cut": float(cut)}

    def _sleep(self) -> None:
        if self.idle_on_host:
            self.engine.offload_weights()
