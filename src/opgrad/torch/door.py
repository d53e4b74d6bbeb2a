"""PyTorch tensors, taken as they are: straight to the kernels, or to `opgrad.torch` where autograd has to know."""

from collections.abc import Mapping
from typing import Any

import torch

from opgrad.call import owners
from opgrad.call.libraries import torch_warm
from opgrad.call.libraries.torch_calls import noted, unseen
from opgrad.call.libraries.torch_tensors import (
    NAME,
    PLAIN_DTYPES,
    REMEDY,
    broadcast,
    check_untraced,
    execute,
    expanded,
    is_direct,
    is_traced,
    is_transformed,
    library,
    note_written,
    owns,
    spec,
    state,
    total,
)
from opgrad.call.libraries.torch_warm import key as warm_key
from opgrad.contract import Operator

# A `Library`, and `Arrays`.
__all__ = ["NAME", "broadcast", "noted", "owns", "run", "spec", "state", "total", "warm_call", "warm_key"]


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on tensors given by parameter name; differentiated where one of them requires grad.

    Raises what the operator raises, ValueError for tensors on several devices, NotImplementedError for devices and
    layouts that have no kernels, and RuntimeError for an `out` that would have to be differentiated.
    """
    if "shape" in op.attributes:
        given = {**given, "shape": _sizes(op, given["shape"])}
    if op.general is not None:
        if torch.compiler.is_compiling():
            # The arguments of a plain call, to which a compiler is held, since it cannot follow how calls are expanded.
            assert op.general is not None
            for name in op.general.keywords:
                if given.get(name) is not None:
                    raise NotImplementedError(f"{op.name}: {name} is given under torch.compile: {REMEDY}")
            given = {name: value for name, value in given.items() if name not in op.general.keywords}
        elif not _is_plain(op, given):
            return unseen(_run_in_form)(op, given)
    return _run(op, given)


def _run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run a declared operator."""
    if given.get("out") is not None:
        return _run_into(op, given)
    if is_direct([value for value in given.values() if isinstance(value, torch.Tensor)]):
        return execute(op, given)
    from opgrad.torch import operators

    return operators.call(op, given)


def warm_call(op: Operator, given: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The warm call for further calls with this one's key; None if there is none."""
    if op.general is not None and not _is_plain(op, given):
        return None
    return torch_warm.call_of(op, given, args, kwargs)


def _is_plain(op: Operator, given: Mapping[str, Any]) -> bool:
    """Whether a call is plain at first sight, which takes a tenth of the time of `expanded`."""
    assert op.general is not None
    dtypes = {value.dtype for value in given.values() if isinstance(value, torch.Tensor)}
    return len(dtypes) == 1 and dtypes <= PLAIN_DTYPES and given.keys().isdisjoint(op.general.keywords)


def _run_in_form(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run a call, expanded if it is not plain."""
    general, arguments = expanded(op, given)
    return _run(op, arguments) if general is op else _run_general(op, given, general, arguments)


def _run_general(op: Operator, given: Mapping[str, Any], general: Operator, arguments: Mapping[str, Any]) -> Any:
    """Run a call that was expanded to an operator of its own, `general` with its arguments."""
    if given.get("out") is not None:
        return _run_into(general, arguments)
    if is_direct([value for value in arguments.values() if isinstance(value, torch.Tensor)]):
        return execute(general, arguments)
    owners.check_owners(general, arguments, library())
    tensors: dict[str, torch.Tensor] = {}
    owners.over_arrays(op, given, tensors.setdefault)
    if any(tensor.is_neg() for tensor in tensors.values()):
        return run(op, owners.over_arrays(op, given, lambda _, tensor: tensor.resolve_neg()))
    from opgrad.torch import primitive

    return primitive.call(op, given)


def _run_into(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run with `out`, for which nothing may have to be differentiated."""
    arrays = owners.arrays_of(op, given)
    tensors = [tensor for tensor in arrays.values() if isinstance(tensor, torch.Tensor)]
    if not is_direct(tensors):
        owners.check_owners(op, given, library())
        _check_no_grad(op, arrays)
        if is_traced(tensors):
            check_untraced(op)
            return _traced_into(op, given)
    results = execute(op, given)
    note_written(results if isinstance(results, tuple) else (results,))
    return results


def _check_no_grad(op: Operator, tensors: Mapping[str, torch.Tensor]) -> None:
    if is_transformed():
        raise RuntimeError(
            f"{op.name}: a call with out= is not open to torch.func, torch.vmap and forward-mode differentiation: "
            "leave out= away"
        )
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(
                f"{op.name}: {name} requires grad, and a call with out= is not differentiated: "
                "leave out= away, or call under torch.no_grad()"
            )


def _traced_into(op: Operator, given: Mapping[str, Any]) -> Any:
    """Compute and copy: the registered operators write nothing that they are given."""
    from opgrad.torch import operators

    out, results = given["out"], operators.call(op, {**given, "out": None})
    several = isinstance(out, tuple)
    pairs = zip(out, results, strict=True) if several else ((out, results),)
    for name, (destination, result) in zip(op.results, pairs, strict=True):
        if destination.dtype != result.dtype or destination.shape != result.shape:
            found = f"{destination.dtype} of shape {tuple(destination.shape)}"
            expected = f"{result.dtype} of shape {tuple(result.shape)}"
            raise ValueError(f"{op.name}: out for {name} is {found}, expected {expected}")
        destination.copy_(result)
    return out


def _sizes(op: Operator, shape: Any) -> Any:
    """The attribute `shape` as a tuple, so that it can be part of a key."""
    if isinstance(shape, torch.Tensor):
        if shape.device.type != "cpu":
            raise ValueError(f"{op.name}: shape is a tensor on {shape.device}, expected one in CPU memory or a tuple")
        if shape.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op.name}: shape has dtype {shape.dtype}, expected int32 or int64")
        shape = shape.tolist()
    return tuple(shape) if isinstance(shape, list) else shape
