"""JAX arrays: on the CPU they are views for the NumPy kernels; on CUDA, DLPack lends them to PyTorch or CuPy.

JAX gives no access to its streams outside of compiled functions, and its arrays are immutable. So on CUDA another
library carries them: its streams run the kernels and its memory holds the results, which DLPack lends to JAX. Both
ways nothing is copied, and each side's streams wait for the other's.
"""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import jax
import numpy as np

from opgrad.base.locks import in_child
from opgrad.call import owners
from opgrad.call.arrays import public_function
from opgrad.call.libraries import jax_private
from opgrad.contract import DTYPES, Operator

KNOWN = frozenset(DTYPES.values())
NAME = "JAX array"


def run(op: Operator, given: Mapping[str, Any], found: Mapping[str, jax.Array]) -> Any:
    """Run an operator on arrays given by parameter name, which are all in `found`, by the names of messages.

    Raises ValueError for arrays on several devices, NotImplementedError for devices that have no kernels, besides what
    the operator raises.
    """
    device = _one_device(op, found)
    if not _is_host(device):
        return _run_carried(op, given, found)
    # The NumPy kernels' results become JAX arrays where they lie, unless they are short: results are aligned from
    # 64 KiB on, and JAX copies those that are not. As of JAX's functions, they are committed to the device if an
    # argument is.
    results = public_function(op.name)(**owners.over_arrays(op, given, lambda name, _: np.asarray(found[name])))
    if any(map(jax_private.is_committed, found.values())):
        return jax.device_put(results, device, may_alias=True)
    with jax.default_device(device):
        return jax.device_put(results, may_alias=True)


# --- checks ---------------------------------------------------------------------------------------------------------


def is_traced(values: Iterable[Any]) -> bool:
    """Whether one of the values stands for numbers that are not there yet: inside of jit, grad, vmap and the like."""
    return any(map(jax_private.is_traced, values))


def is_spread(values: Iterable[jax.Array]) -> bool:
    """Whether one of the arrays lies on several devices; none of them is traced."""
    return any(len(value.devices()) > 1 for value in values if isinstance(value, jax.Array))


def check(op: Operator, given: Mapping[str, Any], library: owners.Library) -> dict[str, Any]:
    """The arrays of a call by name, traced or not. Raises TypeError unless they are JAX arrays of known dtypes."""
    if given.get("out") is not None:
        raise TypeError(f"{op.name}: JAX arrays are immutable and take no out=: leave it away and use the result")
    found = owners.arrays_of(op, given)
    for name, value in given.items():
        if name not in found and jax_private.is_traced(value):
            raise TypeError(
                f"{op.name}: {name} is traced by jit, grad or vmap and holds no number yet: expected a value that is "
                "known when the function is traced, such as one of jit's static_argnums"
            )
    owners.check_owners(op, given, library)
    for name, array in found.items():
        if not isinstance(array, jax.Array):
            raise TypeError(f"{op.name}: {name} is a {type(array).__name__}, expected a JAX array")
        if array.dtype not in KNOWN:
            expected = ", ".join(DTYPES if op.general else op.inputs[name].dtypes)
            raise TypeError(f"{op.name}: {name} has dtype {array.dtype.name}, expected one of {expected}")
    _check_float64(op, given, found)
    return found


def _check_float64(op: Operator, given: Mapping[str, Any], found: Mapping[str, jax.Array]) -> None:
    """Raise TypeError for float64 where JAX would make float32 of the result."""
    if jax_private.has_float64():
        return
    double = DTYPES["float64"]
    asked = given.get("out_dtype")
    dtypes = [(name, array.dtype) for name, array in found.items()]
    dtypes += [("out_dtype", dtype) for dtype in (asked if isinstance(asked, tuple) else (asked,))]
    for name, dtype in dtypes:
        try:
            is_double = dtype is not None and np.dtype(dtype) == double
        except (TypeError, ValueError):  # what stands for no dtype is refused where the call is checked
            is_double = False
        if is_double:
            raise TypeError(
                f"{op.name}: {name} is float64, which JAX has once jax_enable_x64 is set: "
                'jax.config.update("jax_enable_x64", True)'
            )


def _one_device(op: Operator, found: Mapping[str, jax.Array]) -> Any:
    """The device of all arrays. Raises ValueError if there are several."""
    (first, model), *_ = found.items()
    for name, array in found.items():
        devices = array.devices()
        if len(devices) > 1:
            raise ValueError(
                f"{op.name}: {name} lies on {len(devices)} devices, expected one: "
                f"gather it with jax.device_put({name}, jax.local_devices()[0])"
            )
        if devices != model.devices():
            raise ValueError(
                f"{op.name}: {name} is on {array.device}, expected {model.device}, the device of {first}: "
                f"move it with jax.device_put({name}, {first}.device)"
            )
    (device,) = model.devices()
    if device.platform not in ("cpu", "gpu"):
        raise NotImplementedError(
            f"{op.name}: {first} is on {device}, expected a CPU or a CUDA device: "
            f'move it with jax.device_put({first}, jax.devices("cpu")[0])'
        )
    return device


def _is_host(device: Any) -> bool:
    return bool(device.platform == "cpu")


# --- on CUDA --------------------------------------------------------------------------------------------------------


class _Torch:
    """A library whose arrays may share memory with JAX's. kind: the type of its arrays."""

    NAME = "PyTorch"

    def __init__(self) -> None:
        import torch

        self.torch: Any = torch
        self.kind: type = torch.Tensor

    def borrow(self, array: jax.Array) -> Any:
        """Its own array in the same memory, which its current stream may use from here on."""
        return self.torch.from_dlpack(array)

    def packed(self, array: Any) -> Any:
        """The array in C order, copied if it is in another: all that JAX takes."""
        return array.contiguous()

    def device(self, array: Any) -> AbstractContextManager[Any]:
        """Make the array's device the current one."""
        return self.torch.cuda.device(array.device)

    def finish(self) -> Callable[[], None]:
        """What waits until the current device has done what was asked of its current stream so far."""
        done = self.torch.cuda.Event(blocking=True)  # The thread that waits sleeps.
        done.record()
        return done.synchronize


class _Cupy:
    """The same of CuPy."""

    NAME = "CuPy"

    def __init__(self) -> None:
        import cupy

        self.cupy: Any = cupy
        self.kind: type = cupy.ndarray

    def borrow(self, array: jax.Array) -> Any:
        if array.dtype == DTYPES["bfloat16"] and int(self.cupy.__version__.partition(".")[0]) < 14:
            raise BufferError("CuPy has bfloat16 from release 14 on")
        return self.cupy.from_dlpack(array)

    def packed(self, array: Any) -> Any:
        return array if array.flags.c_contiguous else self.cupy.ascontiguousarray(array)

    def device(self, array: Any) -> AbstractContextManager[Any]:
        return array.device

    def finish(self) -> Callable[[], None]:
        done = self.cupy.cuda.Event(block=True)
        done.record()
        return done.synchronize


@cache
def _carrier() -> _Torch | _Cupy | None:
    """PyTorch if it is installed and built for CUDA, else CuPy; None if neither is installed."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            return _Torch()
    return None if importlib.util.find_spec("cupy") is None else _Cupy()


# One thread that keeps arrays until a device is done with them: JAX gives their memory to others as soon as the
# last reference is gone, and does not see that kernels on other streams than its own still read it.
_keeper: ThreadPoolExecutor


def _new_keeper() -> None:
    global _keeper
    _keeper = ThreadPoolExecutor(1, thread_name_prefix="opgrad-jax")


_new_keeper()
in_child(_new_keeper)


def _run_carried(op: Operator, given: Mapping[str, Any], found: Mapping[str, jax.Array]) -> Any:
    """Run on the carrier's arrays in the memory of JAX's, and hand the results to JAX."""
    carrier = _carrier()
    if carrier is None:
        raise ImportError(
            f"{op.name}: JAX arrays on CUDA reach the kernels through PyTorch or CuPy, and neither is installed: "
            "pip install torch, or the CuPy for your release of CUDA"
        )
    borrowed = {}
    for name, array in found.items():
        try:
            borrowed[name] = carrier.borrow(array)
        except (BufferError, NotImplementedError, RuntimeError, TypeError) as error:
            what = f"{name}, {array.dtype.name} on {array.device}, from JAX"
            raise NotImplementedError(f"{op.name}: {carrier.NAME} cannot take {what}: {error}") from error
    library = owners.library_of(carrier.kind)
    assert library is not None
    held = tuple(borrowed.values())
    with carrier.device(held[0]):  # On whose stream JAX waits for the results.
        results = library.run(op, owners.over_arrays(op, given, lambda name, _: borrowed[name]))
        finish = carrier.finish()
        try:
            _keeper.submit(lambda held: finish(), held)
        except RuntimeError:  # The interpreter is ending and starts no thread.
            finish()
        if isinstance(results, tuple):
            return tuple(jax.dlpack.from_dlpack(carrier.packed(each)) for each in results)
        return jax.dlpack.from_dlpack(carrier.packed(results))
