"""The whole update of a PPO critic on a Megatron rank against Hugging Face in float64: values, GAE, clipped loss, one AdamW step.

Layouts, pipelines and packing of the scalar head: tests/engine/test_parity.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridflow.algorithms.token_advantages import TokenAdvantages
from hybridflow.algorithms.value_loss import value_loss
from hybridflow.cluster.context import WorkerContext
from hybridflow.config.layout import Layout
from hybridflow.config.schema import Config, CriticConfig, WeightsConfig
from hybridflow.engine.device import Device
from hybridflow.workers.critic import CriticWorker
from tests.algorithms import reference
from tests.config.support import followed
from tests.engine.conftest import cpu_rank  # noqa: F401  (fixture)
from tests.engine.reference import load_model, reference_values
from tests.engine.tiny import OPTIMIZER, make_batch, make_checkpoint

GAMMA, LAM, CLIP = 0.95, 0.9, 0.05


def worker(path: str, offload: bool) -> CriticWorker:
    config = Config()
    config.actor.model.path = path
    config.critic = CriticConfig(model=WeightsConfig(path, "float32"), optimizer=OPTIMIZER, max_tokens_per_micro_batch=40,
                                 value_max_tokens_per_micro_batch=64, offload=offload, clip_value=CLIP)
    followed(config)
    return CriticWorker(WorkerContext(0, 1, Layout(1), None, "cpu"), config, config.critic, value_loss(config.critic), total_steps=2)


@pytest.mark.parametrize("offload", [False, True])
def test_two_updates_equal_the_reference(cpu_rank: Device, tmp_path: Path, offload: bool) -> None:  # noqa: F811
    path, batch = make_checkpoint(tmp_path, "llama", layers=2, scalar=True), make_batch(7, 5, longest=12, empty=0.2)
    critic, model = worker(path, offload), load_model(path, scalar=True)
    batch = batch.union(critic.compute_values(batch))
    old_T = reference_values(model, batch)[0].detach()
    torch.testing.assert_close(batch["values"].values.double(), old_T, rtol=1e-5, atol=1e-5)

    rows = torch.arange(len(batch))
    reward_B = torch.randn(len(rows), generator=torch.Generator().manual_seed(1))
    scored = batch.with_columns(reward=reward_B, score=reward_B.double(), trained=torch.ones(len(rows), dtype=torch.int64))
    batch = scored.union(TokenAdvantages(GAMMA, LAM, 0.0, "k1")(scored, lambda values: values))
    ends = [[0.0] * (len(row) - 1) + [reward.item()] if len(row) else [] for row, reward in zip(batch["response_ids"].rows(), reward_B)]
    split = old_T.split(batch["response_ids"].lengths.tolist())
    return_T = torch.tensor([value for end, values in zip(ends, split) for value in reference.gae(end, values.tolist(), GAMMA, LAM)[1]],
                            dtype=torch.float64)
    torch.testing.assert_close(batch["returns"].values.double(), return_T, rtol=1e-4, atol=1e-5)

    batch = batch.with_columns(metric_weight=batch["loss_weight"])
    decayed, plain = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    adam = torch.optim.AdamW([{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": plain, "weight_decay": 0.0}],
                             lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
    for _ in range(2):  # the second is off the rollout's values, so that some are clipped
        new_T = reference_values(model, batch)[0]
        near_T = old_T + (new_T - old_T).clamp(-CLIP, CLIP)
        loss = 0.5 * torch.maximum((new_T - return_T) ** 2, (near_T - return_T) ** 2).mean()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)
        adam.step()
        found = critic.update_critic(batch)
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert found["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        critic.rest()
    assert 0 < found["clip_fraction"] < 1
    for name in ("score.weight", "model.norm.weight"):
        ours = critic.engine.parameters()[{"model.norm.weight": "decoder.final_layernorm.weight"}.get(name, name)]
        torch.testing.assert_close(ours.double(), dict(model.named_parameters())[name].detach(), rtol=1e-4, atol=1e-5)
