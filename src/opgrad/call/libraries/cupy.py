"""CuPy arrays: addresses for the Triton kernels, on the device and the stream that CuPy would use."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, cast

import cupy
import numpy as np

from opgrad.call import arrays, owners
from opgrad.call.libraries.device import Runners
from opgrad.contract import DTYPES, FLOAT8, Array, Operator, Shape, Spec, normalise
from opgrad.contract.arrangement import contiguous, memory_order
from opgrad.contract.declaration import HOST, NUMBERS, Arrays
from opgrad.cuda import ALIGNMENT

NAME = "CuPy array"
NARROW = ("bfloat16", *FLOAT8)  # what not every release of CuPy has
FIRST_WITHOUT_TORCH = (3, 8)  # the release of Triton from which it finds the GPU by itself


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on arrays given by parameter name, on their device and CuPy's current stream there.

    Raises what the operator raises, ValueError for arrays on several devices, and ImportError where Triton is
    missing or finds no GPU.
    """
    first = given.get(op.arrays[0])
    if not isinstance(first, cupy.ndarray):
        return _runners.run(op, given)
    before, device = cupy.cuda.runtime.getDevice(), first.data.device_id
    # `with first.device` would go back to the device that CuPy set last, which PyTorch may have changed since.
    if device != before:
        cupy.cuda.runtime.setDevice(device)
    try:
        return _runners.run(*arrays.expanded(op, dict(given), cast(Arrays, _library())))
    finally:
        if device != before:
            cupy.cuda.runtime.setDevice(before)


def _library() -> owners.Library:
    found = owners.library_of(cupy.ndarray)
    assert found is not None
    return found


# --- what a signature must be ---------------------------------------------------------------------------------------


def _settle(op: Operator, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments as they are. Raises unless all arrays lie on one device that Triton reaches."""
    owners.check_owners(op, given, _library())
    found = owners.arrays_of(op, given)
    for name, array in found.items():
        # An array that is distributed over devices has no address.
        if not isinstance(array, cupy.ndarray) or type(array).__name__ == "DistributedArray":
            raise TypeError(f"{op.name}: {name} is a {type(array).__name__}, expected a CuPy array")
    (first, model), *others = found.items()
    for name, array in others:
        if array.data.device_id != model.data.device_id:
            raise ValueError(
                f"{op.name}: {name} is on device {array.data.device_id}, expected {model.data.device_id}, "
                f"the device of {first}: copy it with cupy.array({name}) inside of `with {first}.device`"
            )
    attributes = {"out_dtype": given.get("out_dtype")}
    if op.kind != "blocks":  # an expanded call's is settled
        normalise(op, attributes, {})
    asked = attributes["out_dtype"]
    for name in NARROW:
        if DTYPES[name] in (asked if isinstance(asked, tuple) else (asked,)):
            try:
                cupy.empty(0, DTYPES[name])
            except (TypeError, ValueError):
                remedy = "use CuPy 14 or newer" if name == "bfloat16" else "use PyTorch tensors"
                wrong = f"out_dtype is {name}, which CuPy {cupy.__version__} has not"
                raise NotImplementedError(f"{op.name}: {wrong}: {remedy}") from None
    _check_driver(op)
    return given


def _check_driver(op: Operator) -> None:
    """Raise ImportError where Triton would find no GPU, because it asks PyTorch for it."""
    if importlib.util.find_spec("triton") is None:
        return  # The plan says so, for every library.
    import triton

    from opgrad.cuda import triton_private

    if triton_private.is_interpreting():
        return
    alone = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= FIRST_WITHOUT_TORCH
    if alone and _reaches_gpu():
        return
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            f"{op.name}: Triton {triton.__version__} finds the GPU through PyTorch, which is not installed: "
            "install PyTorch for CUDA beside it, or Triton 3.8 or newer"
        )
    import torch

    if not torch.cuda.is_available():
        remedy = "or do not import it" if alone else "or Triton 3.8 or newer, which does without"
        raise ImportError(
            f"{op.name}: Triton {triton.__version__} finds the GPU through PyTorch {torch.__version__}, "
            f"which sees none: install PyTorch for CUDA, {remedy}"
        )


@cache
def _reaches_gpu() -> bool:
    """Whether Triton has a driver that asks PyTorch for nothing, or asks one that sees the GPU.

    Looking for devices, Triton imports PyTorch where it is installed, and from then on asks it, even one for the CPU
    alone. A driver that was made before does not.
    """
    from opgrad.cuda import triton_private

    if "torch" in sys.modules:
        return False
    if importlib.util.find_spec("torch") is None:
        return True
    use = triton_private.use_own_driver()
    import torch

    if not torch.cuda.is_available():
        use()
    return True


# --- what general calls are put together from: `contract.declaration.Arrays` ------------------------------------------


def owns(value: Any) -> bool:
    """Whether a value belongs to CuPy."""
    return owners.library_of(type(value)) is _library()


def spec(array: Any) -> Spec:
    """The shape and the dtype of a CuPy array, or of what NumPy takes for one."""
    return Spec(array.shape, array.dtype) if isinstance(array, cupy.ndarray) else HOST.spec(array)


def broadcast(array: Any, shape: Shape, like: Any) -> Any:
    """A view of a CuPy array, or a number as an array on the current device, in this shape; all else as it is."""
    if isinstance(array, NUMBERS):
        array = cupy.array(array, np.bool_ if isinstance(array, bool) else np.float64)
    if not isinstance(array, cupy.ndarray) or array.shape == shape:
        return array
    return cupy.broadcast_to(array, shape)


def state(words: Array, like: Any) -> Any:
    """The two as int64 on the current device; CuPy copies them from pinned memory, without waiting."""
    return cupy.array(words, np.int64)


def total(array: Any, axes: tuple[int, ...], shape: Shape, dtype: str) -> Any:
    """The sum over these axes in float64."""
    summed = array.sum(axes, dtype=np.float64).reshape(shape) if axes else array
    return summed.astype(DTYPES[dtype])


# --- memory ---------------------------------------------------------------------------------------------------------


def _bits(array: Any) -> Any:
    """The array as unsigned integers, to be copied: so CuPy needs no bfloat16."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


class _CupyMemory:
    """`owners.DeviceMemory` for CuPy arrays, with memory orders as CuPy's own functions have them."""

    def key(self, array: Any) -> Any:
        # The type is part of the key because subclasses may have no memory of their own.
        place = array.data
        return type(array), array.shape, array.strides, array.dtype, place.device_id, place.ptr % ALIGNMENT

    def spec(self, array: Any) -> Spec:
        return Spec(array.shape, array.dtype, array.strides)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def strides(self, spec: Spec, order: tuple[int, ...], model: Any) -> tuple[int, ...]:
        """Those of the order in which the first array lies in memory."""
        return contiguous(spec.shape, order, spec.dtype.itemsize)

    def maker(self, spec: Spec, like: Any) -> Callable[[], Any]:
        order = memory_order(spec.shape, spec.strides or ())
        make = partial(cupy.empty, tuple(spec.shape[axis] for axis in order), spec.dtype)
        if order == tuple(range(len(order))):
            return make
        inverse = _inverse(order)
        return lambda: make().transpose(inverse)

    def packed(self, array: Any, order: tuple[int, ...]) -> Any:
        copy = cupy.ascontiguousarray(_bits(array).transpose(order))
        return copy.view(array.dtype).transpose(_inverse(order))

    def assign(self, destination: Any, source: Any) -> None:
        _bits(destination)[...] = _bits(source)

    def words(self, array: Any) -> tuple[int, int]:
        position, value = array[:16].view(np.int64).get().tolist()
        return position, value

    def stream(self, like: Any) -> int | None:
        return int(cupy.cuda.get_current_stream().ptr)


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


_runners = Runners(_CupyMemory(), _settle)
