"""The private names of PyTorch that opgrad uses, looked up here once, each with a replacement.

If a release of PyTorch lacks a name, this costs speed or the feature that needed it, and the name is in `MISSING`; the
import and plain calls work without any of them. Native code looks up its own names in `torch_calls`.
"""

import contextlib
import functools
import pkgutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

MISSING: list[str] = []


def _found(path: str, otherwise: Any = None) -> Any:
    """The object at this path; if it is missing, `otherwise`, and the path is recorded."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        MISSING.append(path)
        return otherwise


def _unpacked(tensor: Tensor, level: int) -> tuple[Tensor, Tensor | None]:
    primal, tangent = forward_ad.unpack_dual(tensor, level=level)
    return primal, tangent


def _current_stream(index: int) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


# --- who has to know of a call ---------------------------------------------------------------------------------------

# Without it, dispatch modes do not see eager calls.
dispatch_modes: Callable[[], int] = _found("torch:_C._len_torch_dispatch_stack", lambda: 0)
_modes: Callable[[], Any] = _found("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", list)
is_tracing: Callable[[], bool] = _found("torch:_C._is_tracing", getattr(torch.jit, "is_tracing", lambda: False))
# Without it, the plain calls of torch.func see no operator.
transforms_active: Callable[[], bool] = _found("torch:_C._are_functorch_transforms_active", lambda: False)
# A batch of gradients, as torch.autograd.grad(is_grads_batched=True) makes them.
is_batched: Callable[[Tensor], bool] = _found("torch:_C._functorch.is_legacy_batchedtensor", lambda _: False)
is_wrapped: Callable[[Tensor], bool] = _found("torch:_C._functorch.is_functorch_wrapped_tensor", lambda _: False)
_interpreters = _found("torch._functorch.pyfunctorch:retrieve_all_functorch_interpreters")
_gradients = _found("torch:_C._functorch.TransformType.Grad")
_found("torch.autograd.forward_ad:_current_level")
forward_state: dict[str, Any] = forward_ad.__dict__  # native code reads the level there


def watchers() -> list[tuple[Callable[[], Any], Any]]:
    """Functions of PyTorch, each with its result while nothing watches calls; empty if one of them is missing.

    Native code calls them, so they are PyTorch's own and no replacements.
    """
    names = {"_len_torch_dispatch_stack": 0, "_is_tracing": False, "_are_functorch_transforms_active": False}
    if not all(hasattr(torch._C, name) for name in names):
        return []
    of_autocast = functools.partial(torch.is_autocast_enabled, "cpu")
    return [*((getattr(torch._C, name), quiet) for name, quiet in names.items()), (of_autocast, False)]


def is_forward_mode() -> bool:
    """Whether a level of torch.autograd.forward_ad has been entered."""
    level: int = getattr(forward_ad, "_current_level", -1)
    return level >= 0


def are_gradients_alone() -> bool:
    """Whether all transformations of torch.func that are at work, if any, are gradients."""
    if _interpreters is None or _gradients is None:
        return not transforms_active()
    return all(each.key() == _gradients for each in _interpreters())


# --- autograd --------------------------------------------------------------------------------------------------------

unpack_dual: Callable[[Tensor, int], Any] = _found("torch:_unpack_dual", _unpacked)
forward_grad_enabled: Callable[[bool], Any] = _found(
    "torch.autograd.forward_ad:_set_fwd_grad_enabled", lambda _: contextlib.nullcontext()
)
no_mode: Callable[[], Any] = _found("torch.utils._python_dispatch:BaseTorchDispatchMode", contextlib.nullcontext)
# Fields of a Function's context and the class of its node, which save a tenth of a call.
has_fields: bool = bool(_found("torch:_C._FunctionBase.to_save") and _found("torch:_C._FunctionBase.materialize_grads"))
has_node_class: bool = _found("torch.autograd.function:_SingleLevelFunction._backward_cls") is not None
_plain_apply = _found("torch:_C._FunctionBase.apply")
after_autograd: Any = _found("torch:_C._after_autograd_keyset")
below_autograd: Any = _found("torch:_C._AutoDispatchBelowAutograd")
_redispatch = _found("torch:_ops.OpOverload.redispatch")
can_redispatch: bool = all(each is not None for each in (after_autograd, below_autograd, _redispatch))


def direct_apply(function: Any) -> Callable[..., Any]:
    """A Function's `apply`, without its own look at what torch.func has left behind, which never comes here."""
    found: Callable[..., Any] = function.apply if _plain_apply is None else super(Function, function).apply
    return found


def implement_transform(library: Any, name: str, run: Callable[..., Any]) -> None:
    """Have the dispatcher call `run` where a transformation of torch.func is at work."""
    if "FuncTorchDynamicLayerFrontMode" not in MISSING:
        try:
            library.impl(name, run, "FuncTorchDynamicLayerFrontMode")
        except RuntimeError:
            MISSING.append("FuncTorchDynamicLayerFrontMode")
            _warn(MISSING[-1:])


# --- devices and groups ----------------------------------------------------------------------------------------------

current_device: Callable[[], int] = _found("torch:_C._cuda_getDevice", torch.cuda.current_device)
current_stream: Callable[[int], int] = _found("torch:_C._cuda_getCurrentRawStream", _current_stream)


def group_of(name: str) -> Any:
    """The process group of a name, as PyTorch's own operators find it."""
    from torch.distributed import distributed_c10d

    resolve: Any = getattr(distributed_c10d, "_resolve_process_group", None)
    if resolve is None:
        raise NotImplementedError(f"opgrad: PyTorch {torch.__version__} finds no process group by its name")
    return resolve(name)


def default_store() -> Any:
    """The store by which the processes of the default group have met; None where this release does not give it.

    Without it, processes that wait for one which has failed are not told the reason.
    """
    from torch.distributed import distributed_c10d

    find: Any = getattr(distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def active_modes() -> list[Any]:
    """The dispatch modes at work; none where they cannot be listed."""
    return list(_modes()) if dispatch_modes() else []


# --- memory of storages ----------------------------------------------------------------------------------------------

references: Callable[[int], int] | None = _found("torch:_C._storage_Use_Count")

# --- torch.onnx, and DTensor -----------------------------------------------------------------------------------------

graph_value: Any = _found("torch:_C.Value")
tensor_type: Any = _found("torch:_C.TensorType")
optional_type: Any = _found("torch:_C.OptionalType")


def sharding_tables() -> tuple[Any, Any]:
    """What describes a call to DTensor, and its propagator, which has such descriptions by operator.

    Raises ImportError or AttributeError if this release has something else. The import takes a second.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    return RuntimeSchemaInfo, DTensor._op_dispatcher.sharding_propagator


def _warn(lacking: Sequence[str]) -> None:
    what = ", ".join(path.replace(":", ".") for path in lacking)
    warnings.warn(f"opgrad: PyTorch {torch.__version__} lacks {what}: some calls are slower or refused", stacklevel=3)


# A build for another device lacks these without being another release.
_of_builds = {"torch:_C._cuda_getDevice", "torch:_C._cuda_getCurrentRawStream"}
if lacking := [path for path in MISSING if path not in _of_builds]:
    _warn(lacking)
