"""Megatron-Core 0.16.1 on CPU ranks, and its bugs without Transformer Engine. Import this before anything of `megatron`.

Two things happen on import, through one import hook on `megatron.core.*`:

* Mends (always, GPUs too): bugs of 0.16.1 that show when Transformer Engine and apex are absent. Each is a function below.
* CPU shim (only where torch sees no GPU): Megatron's modules get a `torch` whose `cuda`, tensor factories and RNG are CPU
  versions. Other code keeps the real torch: patching torch.zeros and friends globally breaks transformers (it builds on the
  meta device). A method call cannot be redirected per module, so `Tensor.cuda`, `Tensor.pin_memory`, `Tensor.type` and
  `Module.cuda` are wrapped for all, and act only when the caller is a Megatron module.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

CPU_SHIM = not torch.cuda.is_available()
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like", "rand", "randn", "as_tensor")


class _Overlay(types.ModuleType):
    """A module with some names replaced; everything else is the real one's."""

    def __init__(self, real: types.ModuleType, names: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(names, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Stream:
    """torch.cuda.Stream and Event on CPU, where work is done in program order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = record = wait = synchronize = _nothing

    def record_event(self, *_: Any) -> _Stream:
        return _Stream()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


# ---- the CPU shim


def _cpu_factory(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return make(*args, **kwargs)

    return factory


def _nothing(*_: Any, **__: Any) -> None: ...


def _set_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _cpu_torch() -> _Overlay:
    """The torch that Megatron's modules see on CPU."""
    rng = {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": _set_seed,
    }
    cuda = {
        "current_device": lambda: torch.device("cpu"),
        "device_count": lambda: 1,
        "set_device": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda stream=None: contextlib.nullcontext(),
        "nvtx": _Overlay(torch.cuda.nvtx, {"range_push": _nothing, "range_pop": _nothing}),
        "random": _Overlay(torch.cuda.random, rng),
        **rng,
    }
    names: dict[str, Any] = {name: _cpu_factory(getattr(torch, name)) for name in FACTORIES}
    return _Overlay(torch, {**names, "cuda": _Overlay(torch.cuda, cuda)})


def _called_by(prefix: str) -> bool:
    """Whether the caller of a wrapped method is a module of that name."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith(prefix)


def _wrap_methods() -> None:
    tensor_cuda, module_cuda = torch.Tensor.cuda, torch.nn.Module.cuda
    tensor_pin, tensor_type = torch.Tensor.pin_memory, torch.Tensor.type

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by("megatron.") else tensor_cuda(self, *args, **kwargs)

    def cuda_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return self if _called_by("megatron.") else module_cuda(self, *args, **kwargs)

    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.clone() if _called_by("megatron.") else tensor_pin(self, *args, **kwargs)  # a copy, as on CUDA

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = tensor_type(self, *args, **kwargs)
        if isinstance(result, str) and self.device.type == "cpu" and _called_by("megatron.core.optimizer"):
            return result.replace("torch.", "torch.cuda.")  # optimizers compare with 'torch.cuda.FloatTensor'
        return result

    torch.Tensor.cuda, torch.Tensor.pin_memory, torch.Tensor.type = cuda, pin_memory, type_name
    torch.nn.Module.cuda = cuda_module


def _cpu_rng(module: types.ModuleType) -> None:
    """The RNG tracker reaches for torch._C's CUDA generators: give it the CPU generator."""
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _no_inductor(module: types.ModuleType) -> None:
    """`jit_fuser` is torch.compile: on CPU that means a C++ compiler at run time for no gain."""
    module.disable_jit_fuser()


def _uneven_collectives(module: types.ModuleType) -> None:
    """gloo has no uneven all-gather or reduce-scatter (expert tensor parallel; mappings.py:150, :184)."""
    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_uneven(
        x: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: list[int] | None = None, *rest: Any, **kw: Any
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(x, group, output_split_sizes, *rest, **kw)
        parts = [x.contiguous() if i == group.rank() else x.new_empty((n, *x.shape[1:])) for i, n in enumerate(output_split_sizes)]
        for i, part in enumerate(parts):
            dist.broadcast(part, dist.get_global_rank(group, i), group=group)
        return torch.cat(parts)

    def reduce_scatter_uneven(
        x: torch.Tensor, group: dist.ProcessGroup, input_split_sizes: list[int] | None = None, *rest: Any, **kw: Any
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(x, group, input_split_sizes, *rest, **kw)
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.split(list(input_split_sizes))[group.rank()].contiguous()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_uneven, reduce_scatter_uneven


def _cpu_splits(module: types.ModuleType) -> None:
    """All-to-all split sizes become numpy only when `.is_cuda` (moe_utils.py)."""
    module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
    )


# ---- mends: bugs without Transformer Engine, on GPUs too


def _mend_router_gemm(module: types.ModuleType) -> None:
    """moe_utils.py:1192 reads `te_general_gemm`, which is never defined when Transformer Engine is absent.

    Where it is defined it would multiply the router's float32 in TF32: other experts could be chosen than without it.
    """
    module.te_general_gemm = None


def _mend_recompute_without_output(module: types.ModuleType) -> None:
    """random.py:636: CheckpointWithoutOutput(fp8=False) takes the fp8 path, whose names are undefined without Transformer Engine."""
    if module.HAVE_TE:
        return

    class NoFP8:
        is_fp8_enabled = staticmethod(lambda: False)
        get_fp8_recipe = staticmethod(lambda: None)

    module.FP8GlobalStateManager = NoFP8
    module.activation_recompute_forward = module.fp8_autocast = lambda *_, **__: contextlib.nullcontext()


def _mend_adamw_state(module: types.ModuleType) -> None:
    """DistributedOptimizer with torch.optim.AdamW cannot be saved and restored.

    state_dict() reads 'step' before the first step (distrib_optimizer.py:642); restoring looks for a per-parameter 'step' (:940);
    and after loading all parameters share ONE step tensor (:821), which AdamW then advances once per parameter.
    """
    if module.HAVE_APEX_OR_TE:
        return
    cls = module.DistributedOptimizer
    state_dict, load_state_dict, set_states = cls.state_dict, cls.load_state_dict, cls._set_main_param_and_optimizer_states

    def fill(self: Any) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                state.setdefault("step", torch.tensor(0.0))
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(parameter)

    def saved(self: Any) -> dict[str, Any]:
        fill(self)
        return state_dict(self)

    @torch.no_grad()
    def restore(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        fill(self)
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        set_states(self, model_param, {**tensors, "step": state["step"]})  # load_state_dict restores the step itself

    def loaded(self: Any, state: dict[str, Any]) -> None:
        load_state_dict(self, state)
        for entry in self.optimizer.state.values():
            entry["step"] = entry["step"].clone()

    cls.state_dict, cls.load_state_dict, cls._set_main_param_and_optimizer_states = saved, loaded, restore


MENDS: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.transformer.moe.moe_utils": _mend_router_gemm,
    "megatron.core.tensor_parallel.random": _mend_recompute_without_output,
    "megatron.core.optimizer.distrib_optimizer": _mend_adamw_state,
}
CPU_PATCHES: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.jit": _no_inductor,
    "megatron.core.tensor_parallel.random": _cpu_rng,
    "megatron.core.tensor_parallel.mappings": _uneven_collectives,
    "megatron.core.transformer.moe.moe_utils": _cpu_splits,
}


class _Hook(importlib.abc.MetaPathFinder):
    """Applies the patches of a Megatron module right after its body has run."""

    def __init__(self, tables: Iterable[dict[str, Callable[[types.ModuleType], None]]], overlay: _Overlay | None) -> None:
        self.tables, self.overlay = list(tables), overlay

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "megatron.core" and not name.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            if self.overlay is not None and module.__dict__.get("torch") is torch:
                module.torch = self.overlay
            for table in self.tables:
                if name in table:
                    table[name](module)

        spec.loader.exec_module = exec_module
        return spec


def _install() -> None:
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron.core was imported before hybridflow.engine.compat; import hybridflow.engine.compat first")
    # What Megatron warns of is not the user's to mend: absent Transformer Engine (expected), deprecations among its own modules.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if CPU_SHIM:
        _wrap_methods()
    sys.meta_path.insert(0, _Hook([MENDS, CPU_PATCHES] if CPU_SHIM else [MENDS], _cpu_torch() if CPU_SHIM else None))


_install()
