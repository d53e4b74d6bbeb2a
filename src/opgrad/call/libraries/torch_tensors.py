"""PyTorch tensors as kernels take them: their memory and dtypes, and what of PyTorch has to know of a call.

Kernels get addresses: the NumPy kernels on the CPU, the Triton kernels on CUDA.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch

from opgrad.call import arrays, owners
from opgrad.call.libraries import torch_calls, torch_private, torch_storages
from opgrad.call.libraries.device import Runners
from opgrad.call.libraries.torch_calls import KINDS
from opgrad.call.runners import HostRunner, extent
from opgrad.contract import DTYPES, FLOATS, Operator, Shape, Spec, signature
from opgrad.contract.arrangement import contiguous
from opgrad.contract.declaration import HOST, NUMBERS, Arrays
from opgrad.cuda import ALIGNMENT

signature.PLAIN.update((torch.dtype, torch.Size))

NAME = "PyTorch tensor"
PLAIN = KINDS
REMEDY = "call it outside of the compiled or transformed function (torch.compiler.disable), or in its plain form"


def expanded(op: Operator, given: Mapping[str, Any]) -> tuple[Operator, Mapping[str, Any]]:
    """The operator that computes a call, and its arguments; for what is no call at all, the operator as it is."""
    first = given.get(op.arrays[0])
    if not isinstance(first, torch.Tensor) or first.is_quantized:
        return op, given
    if given.get("out_dtype") is not None:
        given = {**given, "out_dtype": numpy_dtypes(given["out_dtype"])}
    return arrays.expanded(op, dict(given), cast(Arrays, library()))


# --- what watches a call ---------------------------------------------------------------------------------------------


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
    return bool(torch_private.dispatch_modes() or torch_private.is_tracing())


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work."""
    return torch_private.transforms_active() or torch_private.is_forward_mode()


def execute(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator's kernels, whatever autograd or a compiler would want to know; `given` as for `run`."""
    first = given.get(op.arrays[0])
    if not isinstance(first, torch.Tensor) or not first.is_cuda:
        return _host.run(op, given)
    if is_here(first):
        return _cuda.run(op, given)
    with torch.cuda.device(first.device):
        return _cuda.run(op, given)


def is_here(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the current CUDA device; one on CUDA shows that CUDA is initialised."""
    return tensor.is_cuda and tensor.device.index == torch_private.current_device()


def note_written(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors have other values, as every in-place operation of PyTorch's does."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def check_untraced(op: Operator) -> None:
    """Raise NotImplementedError for an operator that PyTorch's dispatcher does not know."""
    if op.kind == "blocks":
        raise NotImplementedError(
            f"{op.name}: a call with attributes, or of mixed or narrow dtypes, is not open to torch.compile, "
            f"torch.func, dispatch modes and tensor subclasses: {REMEDY}"
        )


# --- what a signature must be ---------------------------------------------------------------------------------------


def library() -> owners.Library:
    library = owners.library_of(torch.Tensor)
    assert library is not None
    return library


def _settle(op: Operator, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments with dtypes as NumPy's. Raises unless all arrays are dense tensors on one device with kernels."""
    owners.check_owners(op, given, library())
    tensors = owners.arrays_of(op, given)
    if not tensors:
        raise TypeError(f"{op.name}: {op.arrays[0]} is None, expected a {NAME}")
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


# --- what general calls are put together from: `contract.libraries.Arrays` -------------------------------------------


def owns(value: Any) -> bool:
    """Whether a value belongs to PyTorch."""
    return owners.library_of(type(value)) is library()


def spec(array: Any) -> Spec:
    """The shape and the dtype of a tensor, or of what NumPy takes for one."""
    if isinstance(array, torch.Tensor):
        return Spec(tuple(array.shape), numpy_dtype(array.dtype))
    return HOST.spec(array)


def broadcast(array: Any, shape: Shape, like: torch.Tensor) -> Any:
    """A view of a tensor, or a number as a tensor beside `like`, in this shape; what is neither as it is."""
    if isinstance(array, NUMBERS):
        dtype = torch.bool if isinstance(array, bool) else torch.float64
        array = torch.full((), array, dtype=dtype, device=like.device)
    if not isinstance(array, torch.Tensor) or array.shape == shape:
        return array
    try:
        return array.expand(shape)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def state(seed: int, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The two as int64 beside `like`; the device fills them in, since a copy from the host would wait."""
    pair = torch.full((2,), seed, dtype=torch.int64, device=like.device)
    pair[1:].fill_(offset)
    return pair


def total(array: torch.Tensor, axes: tuple[int, ...], shape: Shape, dtype: str) -> torch.Tensor:
    """The sum over these axes in float64; on the CPU NumPy's, whose order does not depend on the threads."""
    if array.device.type == "cpu":
        made = torch.empty(shape, dtype=TORCH_DTYPES[DTYPES[dtype]])
        np.copyto(view_of(made), HOST.total(view_of(array), axes, shape, dtype))
        return made
    summed = array.sum(axes, dtype=torch.float64).reshape(shape) if axes else array
    return summed.to(TORCH_DTYPES[DTYPES[dtype]])


# --- memory ---------------------------------------------------------------------------------------------------------


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of the same name in NumPy or ml_dtypes. Raises TypeError if there is none."""
    known = NUMPY_DTYPES.get(dtype)
    if known is not None:
        return known
    name = str(dtype).removeprefix("torch.")
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise TypeError(f"opgrad: tensors of dtype {name} are not supported, expected {', '.join(DTYPES)}") from None


TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {dtype: getattr(torch, name) for name, dtype in DTYPES.items()}
NUMPY_DTYPES = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}
PLAIN_DTYPES = frozenset(getattr(torch, name) for name in FLOATS)


class _TensorMemory:
    """`owners.DeviceMemory` for tensors on CUDA."""

    def key(self, array: torch.Tensor) -> Any:
        return array.shape, array.stride(), array.dtype, array.device, array.data_ptr() % ALIGNMENT

    def spec(self, array: torch.Tensor) -> Spec:
        dtype = numpy_dtype(array.dtype)
        return Spec(tuple(array.shape), dtype, tuple(stride * dtype.itemsize for stride in array.stride()))

    address = staticmethod(torch.Tensor.data_ptr)

    def strides(self, spec: Spec, order: tuple[int, ...], model: torch.Tensor | None) -> tuple[int, ...]:
        """Those of torch.empty_like for a result like `model`; any other result is in C order."""
        if model is None:
            return contiguous(spec.shape, tuple(range(len(spec.shape))), spec.dtype.itemsize)
        like = torch.empty_like(model, device="meta", requires_grad=False)
        return tuple(stride * spec.dtype.itemsize for stride in like.stride())

    def maker(self, spec: Spec, like: torch.Tensor) -> Callable[[], torch.Tensor]:
        return partial(torch.empty_strided, *_places(spec), dtype=TORCH_DTYPES[spec.dtype], device=like.device)

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
        return torch_private.current_stream(like.device.index)


def _places(spec: Spec) -> tuple[Shape, Shape]:
    """Shape, and strides in elements."""
    return spec.shape, tuple(stride // spec.dtype.itemsize for stride in spec.strides or ())


class _HostMemory(_TensorMemory):
    """Tensors on the CPU, whose kernels take any alignment."""

    def key(self, array: torch.Tensor) -> Any:
        return array.shape, array.stride(), array.dtype, array.device

    def maker(self, spec: Spec, like: torch.Tensor) -> Callable[[], torch.Tensor]:
        return torch_storages.maker(*_places(spec), TORCH_DTYPES[spec.dtype])


class _HostRunner(HostRunner):
    """Runs the calls of one signature on the CPU, and notes how each was answered."""

    def run(self, given: Mapping[str, Any]) -> Any:
        out = given.get("out")
        operands, results = self.computed([given.get(name) for name in self.op.inputs], out)
        answer = self.finish(tuple(results))
        torch_calls.note(self, operands, results, out is None, answer)
        return answer


def view_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A NumPy array of which the tensor does not know."""
    return extent(tensor.data_ptr(), _host.memory.spec(tensor))


_host = Runners(_HostMemory(), _settle, _HostRunner)
_cuda = Runners(_TensorMemory(), _settle)
