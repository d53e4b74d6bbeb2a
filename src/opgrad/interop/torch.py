"""PyTorch tensors: on the CPU they are views for the NumPy kernels, on CUDA addresses for the Triton kernels."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.autograd import forward_ad

from opgrad import arrays, interop
from opgrad.contract import DTYPES, Operator, Spec
from opgrad.cuda import ALIGNMENT
from opgrad.interop.device import DevicePlan, Runners, Signature
from opgrad.layout import contiguous

NAME = "PyTorch tensor"
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # types that hide nothing


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on tensors given by parameter name; differentiated where one of them requires grad.

    Raises what the operator raises, ValueError for tensors on several devices, NotImplementedError for devices and
    layouts that have no kernels, and RuntimeError for an `out` that would have to be differentiated.
    """
    if "shape" in op.attributes:
        given = {**given, "shape": _sizes(op, given["shape"])}
    if given.get("out") is not None:
        return _run_into(op, given)
    if is_direct([value for value in given.values() if isinstance(value, torch.Tensor)]):
        return execute(op, given)
    from opgrad.torch import operators

    return operators.call(op, given)


def is_direct(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a call may go straight to the kernels, because no part of PyTorch has to know of it."""
    if torch.compiler.is_compiling() or _is_recorded() or is_transformed():
        return False
    differentiates = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) not in PLAIN or tensor.is_neg() or (differentiates and tensor.requires_grad):
            return False
    return True


def is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether PyTorch's dispatcher must see the call: it is compiled or recorded, or a tensor stands for others."""
    if torch.compiler.is_compiling() or _is_recorded():
        return True
    return any(type(tensor) not in PLAIN or tensor.is_neg() for tensor in tensors)


def _is_recorded() -> bool:
    """Whether a dispatch mode or torch.jit.trace watches; the public functions that tell cost three times as much."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._is_tracing())


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def execute(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator's kernels, whatever autograd or a compiler would want to know; `given` as for `run`."""
    first = given.get(op.arrays[0])
    if not isinstance(first, torch.Tensor) or not first.is_cuda:
        return _host.run(op, given)
    if first.device.index == torch._C._cuda_getDevice():  # a tensor on CUDA shows that CUDA is initialised
        return _cuda.run(op, given)
    with torch.cuda.device(first.device):
        return _cuda.run(op, given)


def _run_into(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run with `out`, for which nothing may have to be differentiated."""
    arrays = interop.arrays_of(op, given)
    tensors = [tensor for tensor in arrays.values() if isinstance(tensor, torch.Tensor)]
    if not is_direct(tensors):
        interop.check_owners(op, given, _library())
        _check_no_grad(op, arrays)
        if is_traced(tensors):
            return _traced_into(op, given)
    results = execute(op, given)
    for tensor in results if isinstance(results, tuple) else (results,):
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)  # as every in-place operation of PyTorch's does
    return results


def _check_no_grad(op: Operator, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if (torch.is_grad_enabled() and tensor.requires_grad) or is_transformed():
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


# --- what a signature must be ---------------------------------------------------------------------------------------


def _library() -> interop.Library:
    library = interop.library_of(torch.Tensor)
    assert library is not None
    return library


def _settle(op: Operator, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with dtypes as NumPy's. Raises unless all arrays are dense tensors on one device with kernels."""
    interop.check_owners(op, given, _library())
    tensors = interop.arrays_of(op, given)
    for name, tensor in tensors.items():
        _check_layout(op, name, tensor)
    (first, model), *others = tensors.items()
    if model.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{op.name}: {first} is on {model.device}, expected cpu or cuda: move it with .to()")
    for name, tensor in others:
        if tensor.device != model.device:
            raise ValueError(
                f"{op.name}: {name} is on {tensor.device}, expected {model.device}, the device of {first}: "
                f"move it with .to({str(model.device)!r})"
            )
    if given.get("out_dtype") is None:
        return given
    return {**given, "out_dtype": numpy_dtypes(given["out_dtype"])}


def numpy_dtypes(out_dtype: Any) -> Any:
    """An `out_dtype`, one or a tuple of them, with PyTorch's dtypes as NumPy's."""
    if isinstance(out_dtype, tuple):
        return tuple(numpy_dtypes(each) for each in out_dtype)
    return numpy_dtype(out_dtype) if isinstance(out_dtype, torch.dtype) else out_dtype


def _check_layout(op: Operator, name: str, tensor: torch.Tensor) -> None:
    if tensor.is_quantized:
        raise TypeError(f"{op.name}: {name} is quantised, expected floating-point numbers: use .dequantize()")
    if tensor.is_nested:
        raise NotImplementedError(
            f"{op.name}: {name} is a nested tensor, expected a dense one: use .to_padded_tensor()"
        )
    if tensor.layout != torch.strided:
        raise NotImplementedError(
            f"{op.name}: {name} has layout {tensor.layout}, expected a dense one: use .to_dense()"
        )


# --- memory ---------------------------------------------------------------------------------------------------------


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of the same name in NumPy or ml_dtypes. Raises TypeError if there is none."""
    name = str(dtype).removeprefix("torch.")
    try:
        return DTYPES.get(name) or np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise TypeError(f"opgrad: tensors of dtype {name} are not supported, expected {', '.join(DTYPES)}") from None


TORCH_DTYPES = {dtype: getattr(torch, name) for name, dtype in DTYPES.items()} | {np.dtype(np.uint8): torch.uint8}


class _Memory:
    """`interop.Memory` for tensors on CUDA."""

    def key(self, array: torch.Tensor) -> Any:
        return array.shape, array.stride(), array.dtype, array.device, array.data_ptr() % ALIGNMENT

    def spec(self, array: torch.Tensor) -> Spec:
        dtype = numpy_dtype(array.dtype)
        return Spec(tuple(array.shape), dtype, tuple(stride * dtype.itemsize for stride in array.stride()))

    def address(self, array: torch.Tensor) -> int:
        return array.data_ptr()

    def strides(self, spec: Spec, order: tuple[int, ...], model: torch.Tensor | None) -> tuple[int, ...]:
        """Those of torch.empty_like for a result like `model`; any other result is in C order."""
        if model is None:
            return contiguous(spec.shape, tuple(range(len(spec.shape))), spec.dtype.itemsize)
        like = torch.empty_like(model, device="meta", requires_grad=False)
        return tuple(stride * spec.dtype.itemsize for stride in like.stride())

    def maker(self, spec: Spec, like: torch.Tensor) -> Callable[[], torch.Tensor]:
        strides = tuple(stride // spec.dtype.itemsize for stride in spec.strides or ())
        return partial(torch.empty_strided, spec.shape, strides, dtype=TORCH_DTYPES[spec.dtype], device=like.device)

    def packed(self, array: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return array.detach().permute(order).contiguous().permute(inverse)

    def assign(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.detach().copy_(source)

    def words(self, array: torch.Tensor) -> tuple[int, int]:
        position, value = array[:16].view(torch.int64).tolist()
        return position, value

    def stream(self, like: torch.Tensor) -> int | None:
        """The current stream of the device, from where Triton takes it too: torch.cuda.current_stream costs 1 µs."""
        return torch._C._cuda_getCurrentRawStream(like.device.index)


class _HostMemory(_Memory):
    """Tensors on the CPU, whose kernels take any alignment."""

    def key(self, array: torch.Tensor) -> Any:
        return array.shape, array.stride(), array.dtype, array.device


class _HostPlan:
    """A signature that the NumPy kernels compute on views of the tensors."""

    def __init__(self, memory: _Memory, op: Operator, given: Mapping[str, Any]):
        signature = Signature(memory, op, given, any_stride=False)
        self.makers, self.several = signature.makers, len(op.results) > 1
        self.views = [(name, _viewer(given[name])) for name in op.inputs if given.get(name) is not None]
        out = given["out"] if signature.brought else tuple(make() for make in self.makers)
        self.out_views = [_viewer(tensor) for tensor in (out if isinstance(out, tuple) else (out,))]
        self.compute = arrays.runner(op, {**given, **self._arrays(given, out)})

    def run(self, given: Mapping[str, Any]) -> Any:
        out = given.get("out")
        if out is None:
            out = tuple(make() for make in self.makers) if self.several else self.makers[0]()
        self.compute(self._arrays(given, out))
        return out

    def _arrays(self, given: Mapping[str, Any], out: Any) -> dict[str, Any]:
        found: dict[str, Any] = {name: view(given[name]) for name, view in self.views}
        if self.several:
            found["out"] = tuple(view(each) for view, each in zip(self.out_views, out, strict=True))
        else:
            found["out"] = self.out_views[0](out[0] if isinstance(out, tuple) else out)
        return found


def _viewer(tensor: torch.Tensor) -> Callable[[torch.Tensor], np.ndarray[Any, Any]]:
    """What gives the NumPy view of tensors of this one's dtype."""
    return _view_bfloat16 if tensor.dtype == torch.bfloat16 else _view


def _view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()


def _view_bfloat16(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return _view(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)


_host = Runners(_HostMemory(), _settle, _HostPlan)
_cuda = Runners(_Memory(), _settle, DevicePlan)
