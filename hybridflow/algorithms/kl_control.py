"""The coefficient of the KL penalty in the reward: fixed, or steered to a target."""

from __future__ import annotations

from hybridflow.config.schema import AlgorithmConfig

MAX_ERROR = 0.2  # of the proportional error


class KLController:
    """coefficient <- coefficient * (1 + clip(KL / target - 1, -0.2, 0.2) * responses / horizon)  (Ziegler et al. 2019,
    arXiv 1909.08593, section 2.2). Without a target the coefficient stays. KL in nats per response token, as the metric `kl`."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.coefficient, self.target, self.horizon = config.kl_coef, config.kl_target, config.kl_horizon

    def update(self, kl: float, responses: int) -> None:
        """Learn of the KL of a step of `responses` responses."""
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -MAX_ERROR), MAX_ERROR)
            self.coefficient *= 1.0 + error * responses / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed coefficient is the configuration's, whatever the saved run had."""
        if self.target is not None:
            self.coefficient = state["coefficient"]
