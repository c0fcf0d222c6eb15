"""The registry against what the configuration declares."""

import pytest

from hybridflow.algorithms.base import Flow
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.config.algorithms import ALGORITHMS as FACTS
from hybridflow.config.schema import AlgorithmConfig, Config
from hybridflow.observe.timer import PhaseTimer


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_an_algorithm_is_what_the_configuration_says_of_it(name: str) -> None:
    algorithm, facts = ALGORITHMS[name], FACTS[name]
    assert algorithm.name == name and algorithm.roles == facts.roles
    assert "actor" in algorithm.losses and set(algorithm.losses) <= set(facts.roles)
    assert ("reward" in facts.roles) <= facts.generates and facts.reference in ("never", "kl", "always")
    assert all(hasattr(AlgorithmConfig(), setting) for setting in facts.unread)
    assert len(set(facts.unread)) == len(facts.unread)
    assert (algorithm.evaluate is None) == facts.generates, "held-out measures of given responses, or validation generates"
    assert set(algorithm.controllers(Config())) == {"kl"} | ({"multiplier"} if "cost" in facts.roles else set())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_state_of_a_flow_survives_a_restart(name: str) -> None:
    config = Config()
    config.algorithm = AlgorithmConfig(name=name, kl_coef=0.1, kl_in="reward", kl_target=0.01)

    def flow() -> Flow:
        return Flow(config, PhaseTimer(on_phase=lambda phase: None), actor=None, controllers=ALGORITHMS[name].controllers(config))

    before, after = flow(), flow()
    before.controllers["kl"].update(1.0, 512)
    state = before.state_dict()
    assert state != after.state_dict()
    after.load_state_dict(state)
    assert after.state_dict() == state
    with pytest.raises(KeyError):
        after.load_state_dict({})
