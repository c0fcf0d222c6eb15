"""ReMax (Li et al. 2023, arXiv 2310.10505): the greedy response is the baseline."""

from __future__ import annotations

from hybridflow.algorithms import stages
from hybridflow.algorithms.advantages import baseline_advantages
from hybridflow.algorithms.base import Algorithm, Flow, Prompts, StepOutput
from hybridflow.algorithms.losses import policy_loss


def remax_step(flow: Flow, prompts: Prompts) -> StepOutput:
    """GRPO's dataflow with one more generation, of greedy responses, and their rewards."""
    batch, greedy = stages.sample(flow, prompts), stages.sample(flow, prompts, greedy=True)
    stages.leave_generation(flow)
    rewards, baseline = stages.start_rewards(flow, batch, prompts), stages.start_rewards(flow, greedy, prompts)
    batch = stages.add_log_probs(flow, batch)
    batch, counts = stages.add_rewards(flow, batch, rewards)
    greedy, _ = stages.add_rewards(flow, greedy, baseline)
    advantage_B = baseline_advantages(stages.penalised(flow, batch), batch["prompt_id"], greedy["score"], greedy["prompt_id"])
    batch = batch.with_columns(advantage=advantage_B)
    return stages.finish(flow, batch, counts, {"baseline/reward": greedy["reward"].nanmean().item()}, stages.update_actor(flow, batch))


REMAX = Algorithm("remax", remax_step, {"actor": policy_loss})
