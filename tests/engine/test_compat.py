"""Each mend and each part of the CPU shim: what fails without it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig

from hybridflow.config.layout import Layout
from hybridflow.engine import compat
from hybridflow.engine.device import Device
from hybridflow.engine.megatron import MegatronEngine
from tests.engine.tiny import OPTIMIZER, clipped_ratio, make_batch

needs_shim = pytest.mark.skipif(not compat.CPU_SHIM, reason="the shim is not installed where torch sees a GPU")


def test_router_gemm_is_exact_float32(one: Device) -> None:
    """Neither a name that is undefined without Transformer Engine, nor its TF32 product with it."""
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    x, weight = torch.randn(3, 64), torch.randn(2, 64)
    found = router_gating_linear(x.to(one.torch_device), weight.to(one.torch_device), None, torch.float32)
    torch.testing.assert_close(found.cpu(), x @ weight.t(), rtol=1e-5, atol=1e-5)


def test_checkpoint_without_output(one: Device) -> None:
    """Output recomputation with fp8=False, as recompute_modules=layernorm uses it."""
    from hybridflow.engine.parallel import init_parallel

    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, model_parallel_cuda_manual_seed

    init_parallel(Layout(world=1), one)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    x = torch.randn(4, device=one.torch_device, requires_grad=True)
    checkpoint = CheckpointWithoutOutput(fp8=False)
    middle = checkpoint.checkpoint(torch.sin, x)
    out = middle * middle
    checkpoint.discard_output_and_register_recompute(out)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().sin() * x.detach().cos())


def test_optimizer_state_is_saved_and_restored(one: Device, checkpoints: dict[str, str]) -> None:
    """A restored AdamW continues like the one that was saved, with a step count of its own per parameter."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    if HAVE_APEX_OR_TE:
        pytest.skip("Megatron takes the optimizer of Transformer Engine or apex: nothing to mend")

    def engine() -> MegatronEngine:
        config = AutoConfig.from_pretrained(checkpoints["llama"])
        made = MegatronEngine(config, Layout(world=1), dtype=torch.float32, device=one, optimizer=OPTIMIZER)
        made.load(checkpoints["llama"])
        return made

    def inner(one: MegatronEngine):  # noqa: ANN202
        return one.optimizer.megatron.chained_optimizers[0]

    call = {"temperature": 1.0, "token_budget": 40, "entropy": False}
    batch = make_batch(4, 30)
    first, second = engine(), engine()
    assert inner(second).state_dict() is not None  # before any step
    first.update(batch, clipped_ratio, **call)
    inner(second).load_state_dict(inner(first).state_dict())
    parameters = [p for group in inner(first).optimizer.param_groups for p in group["params"]]
    for model, main in zip(inner(first).model_param_group_index_map, parameters):
        twin = dict(zip(inner(first).model_param_group_index_map, inner(second).model_param_group_index_map))[model]
        state = inner(first)._get_main_param_and_optimizer_states(model)
        inner(second)._set_main_param_and_optimizer_states(twin, {k: v for k, v in state.items() if k != "step"})
    steps = [state["step"] for state in inner(second).optimizer.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps) and all(step.item() == 1 for step in steps)
    second.weights_changed()
    near = {"rtol": 0.0, "atol": 1e-6 if one.is_cuda else 0.0}  # kernels of a GPU may add in another order
    losses = [torch.tensor(engine.update(batch, clipped_ratio, **call)["loss"]) for engine in (first, second)]
    torch.testing.assert_close(*losses, **near)
    assert all(state["step"].item() == 2 for state in inner(second).optimizer.state.values())
    for name, tensor in first.parameters().items():
        torch.testing.assert_close(tensor, second.parameters()[name], **near)


def test_compat_must_come_first() -> None:
    with pytest.raises(RuntimeError, match="imported before hybridflow.engine.compat"):
        compat._install()


@needs_shim
def test_megatron_sees_a_cpu_torch() -> None:
    from megatron.core import utils

    assert utils.torch is not torch and utils.torch.float32 is torch.float32
    assert utils.torch.zeros(2, device="cuda", pin_memory=True).device.type == "cpu"
    assert utils.torch.empty_like(torch.ones(2), device="cuda").device.type == "cpu"
    assert utils.torch.cuda.current_device() == torch.device("cpu") and utils.torch.cuda.device_count() == 1


@needs_shim
def test_only_megatron_sees_it() -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1).cuda()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with torch.device("meta"):
        assert torch.zeros(2).is_meta  # transformers builds its models this way


@needs_shim
def test_streams_do_nothing() -> None:
    from megatron.core import utils

    stream, event = utils.torch.cuda.Stream(), utils.torch.cuda.Event()
    stream.wait_stream(utils.torch.cuda.current_stream())
    stream.wait_event(event)
    event.record()
    assert event.query() and stream.record_event() == event
    with utils.torch.cuda.stream(stream):
        utils.torch.cuda.synchronize()


@needs_shim
def test_no_compiler_at_run_time() -> None:
    from megatron.core import jit

    def function(x: int) -> int:
        return x

    assert jit.jit_fuser(function) is function


@needs_shim
def test_random_states_are_the_cpu_generators(cpu_rank: Device) -> None:
    from hybridflow.engine.parallel import init_parallel

    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    init_parallel(Layout(world=1), cpu_rank)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    outside = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), outside)
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(3), first)


@needs_shim
def test_split_sizes_become_numpy() -> None:
    from megatron.core.transformer.moe import moe_utils

    assert moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True).tolist() == [1, 2]
    assert moe_utils.maybe_move_tensor_to_cpu(None, as_numpy=True) is None
