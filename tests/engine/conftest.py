"""One rank inside the test process: CPU with gloo, or the GPU with NCCL for tests marked gpu."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridflow.engine.device import Device
from tests.engine.tiny import make_checkpoint


def one_rank(kind: str, store: Path) -> Iterator[Device]:
    from hybridflow.engine.parallel import shutdown_parallel

    device = Device.detect(kind)
    device.activate()
    dist.init_process_group(device.backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield device
    shutdown_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def cpu_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    if torch.cuda.is_available():
        pytest.skip("Megatron would use the GPU that torch sees; hide it: CUDA_VISIBLE_DEVICES=")
    yield from one_rank("cpu", tmp_path_factory.mktemp("store") / "file")


@pytest.fixture(scope="module")
def gpu_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU: torch sees none")
    yield from one_rank("cuda", tmp_path_factory.mktemp("store") / "file")


@pytest.fixture(params=["cpu_rank", pytest.param("gpu_rank", marks=pytest.mark.gpu)])
def one(request: pytest.FixtureRequest) -> Device:
    """Whichever this machine has; tests marked gpu run there only."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(folder, family) for family in ("llama", "qwen2")}
