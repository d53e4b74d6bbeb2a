"""CuPy arrays: addresses for the Triton kernels, on the device and the stream that CuPy would use."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import cupy
import numpy as np

from opgrad import interop
from opgrad.contract import DTYPES, Operator, Spec, normalise
from opgrad.cuda import ALIGNMENT
from opgrad.interop.device import Runners
from opgrad.layout import contiguous, memory_order

NAME = "CuPy array"
FIRST_WITHOUT_TORCH = (3, 8)  # the release of Triton from which it finds the GPU by itself


def run(op: Operator, given: Mapping[str, Any]) -> Any:
    """Run an operator on arrays given by parameter name, on their device and CuPy's current stream there.

    Raises what the operator raises, ValueError for arrays on several devices, and ImportError where Triton is
    missing or finds no GPU.
    """
    first = given.get(op.arrays[0])
    before = cupy.cuda.runtime.getDevice()
    if not isinstance(first, cupy.ndarray) or first.data.device_id == before:
        return _runners.run(op, given)
    # `with first.device` would go back to the device that CuPy set last, which PyTorch may have changed since.
    cupy.cuda.runtime.setDevice(first.data.device_id)
    try:
        return _runners.run(op, given)
    finally:
        cupy.cuda.runtime.setDevice(before)


# --- what a signature must be ---------------------------------------------------------------------------------------


def _settle(op: Operator, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments as they are. Raises unless all arrays lie on one device that Triton reaches."""
    library = interop.library_of(cupy.ndarray)
    assert library is not None
    interop.check_owners(op, given, library)
    arrays = interop.arrays_of(op, given)
    for name, array in arrays.items():
        # An array that is distributed over devices has no address.
        if not isinstance(array, cupy.ndarray) or type(array).__name__ == "DistributedArray":
            raise TypeError(f"{op.name}: {name} is a {type(array).__name__}, expected a CuPy array")
    (first, model), *others = arrays.items()
    for name, array in others:
        if array.data.device_id != model.data.device_id:
            raise ValueError(
                f"{op.name}: {name} is on device {array.data.device_id}, expected {model.data.device_id}, "
                f"the device of {first}: copy it with cupy.array({name}) inside of `with {first}.device`"
            )
    _check_bfloat16(op, given)
    _check_driver(op)
    return given


def _check_bfloat16(op: Operator, given: Mapping[str, Any]) -> None:
    """Raise NotImplementedError if results are to be bfloat16 and CuPy has no such arrays."""
    attributes = {"out_dtype": given.get("out_dtype")}
    normalise(op, attributes, {})
    asked = attributes["out_dtype"]
    if DTYPES["bfloat16"] not in (asked if isinstance(asked, tuple) else (asked,)):
        return
    try:
        cupy.empty(0, DTYPES["bfloat16"])
    except (TypeError, ValueError):
        raise NotImplementedError(
            f"{op.name}: out_dtype is bfloat16, which CuPy {cupy.__version__} has not: use CuPy 14 or newer"
        ) from None


def _check_driver(op: Operator) -> None:
    """Raise ImportError where Triton would find no GPU, because it asks PyTorch for it."""
    if importlib.util.find_spec("triton") is None:
        return  # The plan says so, for every library.
    import triton

    if triton.knobs.runtime.interpret:
        return
    alone = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= FIRST_WITHOUT_TORCH
    if alone and "torch" not in sys.modules:
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


# --- memory ---------------------------------------------------------------------------------------------------------


def _bits(array: Any) -> Any:
    """The array as unsigned integers, to be copied: so CuPy needs no bfloat16."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


class _Memory:
    """`interop.Memory` for CuPy arrays, with memory orders as CuPy's own functions have them."""

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


_runners = Runners(_Memory(), _settle)
