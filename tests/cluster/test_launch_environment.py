"""The environment each rank gets, without starting any."""

from __future__ import annotations

import pytest

from hybridflow.cluster.launch_environment import rank_environments
from hybridflow.cluster.worker import Place


def place(node: str, *gpus: str) -> Place:
    return Place(node_id=node, host=node, address=f"10.0.0.{ord(node)}", pid=1, gpus=gpus, free_port=4000 + ord(node), stack_fd=3)


def test_ranks_of_a_node_see_all_its_devices_of_the_group_as_under_torchrun() -> None:
    places = [place("a", "2"), place("a", "5"), place("b", "0"), place("b", "1")]
    environments = rank_environments(places, "cuda", "job", {})
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["2,5", "2,5", "0,1", "0,1"]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "0", "1"]
    shared = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert {tuple(e[name] for name in shared) for e in environments} == {("10.0.0.97", "4097", "4", "2")}
    assert all("GLOO_SOCKET_IFNAME" not in e for e in environments)


def test_host_memory_is_pinned_by_the_threads_of_a_rank_unless_the_user_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(24)))
    places = [place("a", "0"), place("a", "1")]
    for environment in rank_environments(places, "cuda", "job", {}):
        assert environment["OMP_NUM_THREADS"] == "12"
        assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert rank_environments(places, "cuda", "job", {})[0]["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:512"


def test_one_host_stays_on_the_loopback_interface() -> None:
    (environment,) = rank_environments([place("a")], "cpu", "job", {})
    assert environment["MASTER_ADDR"] == "127.0.0.1" and environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_switches_of_libraries_are_forwarded_and_the_callers_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    (environment,) = rank_environments([place("a")], "cpu", "job", {"NCCL_DEBUG": "WARN"})
    assert environment["NCCL_DEBUG"] == "WARN" and environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment
