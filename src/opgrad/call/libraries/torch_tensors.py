"""PyTorch's tensors, on the CPU and on CUDA: their memory, their calls, results in storages that a pool keeps.

Memory that NumPy's pool gives cannot be resized, as sharded training does. So results lie in storages as torch.empty
makes them, of which the pool keeps one reference each. It looks at the counts of references, of C++ and of Python, when
it needs a storage of that size: a tensor, a view, autograd, a NumPy array or DLPack's capsule hold one each.
"""

import ctypes
import math
import sys
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from operator import call
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch

from opgrad.call import arrays, owners
from opgrad.call.arrays import HostRunner, extent
from opgrad.call.entries import Answered
from opgrad.call.libraries import torch_calls, torch_private
from opgrad.call.libraries.device import Runners
from opgrad.call.libraries.torch_calls import KINDS
from opgrad.contract import DTYPES, FLOATS, Array, Operator, Shape, Spec, signature
from opgrad.contract.arrangement import contiguous
from opgrad.contract.declaration import HOST, NUMBERS, Arrays
from opgrad.contract.signature import is_plain
from opgrad.cpu.runtime import pool
from opgrad.cuda import ALIGNMENT

POOLED_FROM = 1 << 20  # bytes from which a result comes from the pool: malloc itself keeps the memory of smaller ones
HUGE_FROM = 1 << 22  # bytes from which huge pages are asked for, as NumPy does
LOOKED_AT = 8  # storages for a result; the next one looks at others
Kept = tuple[Any, int]  # a storage, and where its memory was
NONE: deque[Kept] = deque()

_kept: dict[int, deque[Kept]] = {}  # by size in bytes
pool.EMPTIED.append(_kept.clear)
# Without the interpreter's lock other threads may change both counts at any time.
_has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
_references: Callable[[int], int] | None = torch_private.references if _has_lock else None


def maker(shape: Shape, strides: Shape, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """What makes results on the CPU of this shape and dtype, with strides in elements that leave no gaps."""
    plain = partial(torch.empty_strided, shape, strides, dtype=dtype, device="cpu")
    size = dtype.itemsize * math.prod(shape)
    if size < POOLED_FROM or size > pool.bound() or _references is None:
        return plain

    def make() -> torch.Tensor:
        storage = _take(size)
        if storage is None:
            return _new(plain, size)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)

    return make


def _take(size: int) -> Any:
    """A storage of so many bytes that nobody uses, which the pool goes on keeping; None if there is none."""
    queue = _kept.get(size, NONE)
    for _ in range(min(len(queue), LOOKED_AT)):
        try:
            kept = queue.popleft()
        except IndexError:  # another thread took it
            return None
        if _counts(kept) != _ALONE:
            queue.append(kept)
            continue
        # It has its own memory of so many bytes no more if a user resized or shared it, or had a NumPy array of it; of
        # one that was cloned lazily, data_ptr makes the copy.
        storage, address = kept
        if storage.nbytes() == size and storage.resizable() and storage.data_ptr() == address:
            queue.append(kept)
            return storage
    return None


def _counts(kept: Kept) -> list[int]:
    """How many references C++ and Python have to a storage, counted in one step of the interpreter.

    Between two steps another thread might turn a reference of the one kind into one of the other.
    """
    counters: tuple[Any, Any] = _references, sys.getrefcount
    return list(map(call, counters, (kept[0]._cdata, kept[0])))


def _new(plain: Callable[[], torch.Tensor], size: int) -> torch.Tensor:
    """A result in new memory, which is kept in place of the storages of other sizes."""
    made = plain()
    start = -(-made.data_ptr() // pool.HUGE) * pool.HUGE
    length = (made.data_ptr() + size) // pool.HUGE * pool.HUGE - start
    if size >= HUGE_FROM and length > 0 and (advise := _advise()):  # the whole huge pages in it
        advise(start, length, pool.ADVICE)
    _kept.setdefault(size, deque()).append((made.untyped_storage(), made.data_ptr()))
    while _held() > pool.bound():
        dropped = next((other for other in list(_kept) if other != size), size)
        queue = _kept.get(dropped, deque())
        with suppress(IndexError):  # another thread was faster
            queue.popleft()
        if not queue:
            _kept.pop(dropped, None)
    return made


def _held() -> int:
    """The bytes of all storages that are kept, in use or not: whatever is released, no more stays."""
    return sum(size * len(queue) for size, queue in list(_kept.items()))


@cache
def _advise() -> Any:
    """The system's madvise, where it can be asked for huge pages."""
    if not pool.ADVICE:
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


_ALONE = _counts((torch.UntypedStorage(1), 0)) if _references else []


REGISTERED = 2  # what `isbuiltin` is for dtypes that a package gives NumPy, such as those of ml_dtypes


def shared(array: Array) -> torch.Tensor:
    """A tensor on an array's memory."""
    if array.dtype.isbuiltin != REGISTERED:
        return torch.from_numpy(array)
    bits: Array = array.view(np.int16 if array.itemsize > 1 else np.int8)
    dtype: Any = getattr(torch, array.dtype.name)
    return torch.from_numpy(bits).view(dtype)


def upload(array: Array, device: str) -> torch.Tensor:
    """A tensor of its own on a device with the numbers of an array."""
    return shared(np.array(array, order="C")).to(device)


def download(tensor: torch.Tensor) -> Array:
    """An array with the numbers of a tensor."""
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


Arguments = tuple[Any, ...]
Named = Mapping[str, Any]


def key(args: Arguments, kwargs: Named) -> Hashable:
    """The signature of a call that may be answered so; None for any other."""
    if torch.compiler.is_compiling():
        return None
    values, of = (*args, *kwargs.values()), _cuda.memory.key
    tensors = [value for value in values if type(value) in PLAIN]
    if not tensors or not is_here(tensors[0]) or not is_direct(tensors):
        return None
    if not all(type(value) in PLAIN or is_plain(value) for value in values):
        return None
    try:
        return (*kwargs, *(of(value) if type(value) in PLAIN else (value, type(value)) for value in values))
    except RuntimeError:  # a tensor without storage
        return None


def call_of(op: Operator, given: Named, args: Arguments, kwargs: Named) -> Callable[[Arguments, Named], Any] | None:
    """What answers calls of a signature of which a plain one was answered; None if not by CUDA's kernels."""
    runner = _cuda.kept.get(_cuda._key(op, given))
    if runner is None:
        return None
    positions = dict(zip(op.parameters, range(len(args)), strict=False))
    sources = [(positions.get(name), name) for name in op.inputs]
    computed, finish = runner.computed, runner.finish

    def call(args: Arguments, kwargs: Named) -> Any:
        arrays = [kwargs.get(name) if place is None else args[place] for place, name in sources]
        out = kwargs.get("out")
        results = computed(arrays, out)[1]
        if out is not None:
            note_written(results)
        return finish(tuple(results))

    return call


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
        what = f"{op.name}: {name}"
        if tensor.is_quantized:
            raise TypeError(f"{what} is quantised, expected floating-point numbers: use .dequantize()")
        if tensor.is_nested:
            raise NotImplementedError(f"{what} is a nested tensor, expected a dense one: use .to_padded_tensor()")
        if tensor.layout != torch.strided:
            raise NotImplementedError(f"{what} has layout {tensor.layout}, expected a dense one: use .to_dense()")
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


# --- what general calls are put together from: `contract.declaration.Arrays` ------------------------------------------


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


def state(words: Array, like: torch.Tensor) -> torch.Tensor:
    """The two as int64 beside `like`; the device fills them in, since a copy from the host would wait."""
    seed, offset = words.tolist()
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
        return maker(*_places(spec), TORCH_DTYPES[spec.dtype])


class _HostRunner(HostRunner):
    """Runs the calls of one signature on the CPU, and notes how each was answered."""

    def answered(self, arguments: Mapping[str, Any]) -> Answered:
        answered = super().answered(arguments)
        torch_calls.note(answered)
        return answered


def view_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A NumPy array of which the tensor does not know."""
    return extent(tensor.data_ptr(), _host.memory.spec(tensor))


_host = Runners(_HostMemory(), _settle, _HostRunner)
_cuda = Runners(_TensorMemory(), _settle)
