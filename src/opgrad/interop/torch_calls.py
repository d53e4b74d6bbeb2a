"""What native code has to know of PyTorch to answer calls on tensors, found out and tried before it is used.

Shape, dtype and address of a tensor come from the C interface that PyTorch keeps stable for compiled models. Where its
Python object has the tensor, and the tensor its set of dispatch keys, is not part of that: both are looked for among
the words of tensors whose values Python tells. Whether a dispatch mode, a trace or a transformation is at work tell
PyTorch's own functions. Where anything is not found, or not as Python has it, calls on tensors are left to Python.
"""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad

from opgrad import entries, functions
from opgrad.entries import NotNative, kept_forever
from opgrad.functions import SUPPORTED, Entries, answer, function_of
from opgrad.interop import torch_private

HALF = frozenset({torch.float16, torch.bfloat16})
KINDS = frozenset({torch.Tensor, torch.nn.Parameter})  # types that hide nothing
WORDS = 24  # of a tensor, at least
LIBRARIES = ("libtorch_cpu.so", "libtorch_python.so")
# In the order of `objects.GET_DIM` and those after it; of C++ functions, the names that releases have given them.
NAMES = (
    ("aoti_torch_get_dim",),
    ("aoti_torch_get_sizes",),
    ("aoti_torch_get_strides",),
    ("aoti_torch_get_dtype",),
    ("aoti_torch_get_data_ptr",),
    ("aoti_torch_grad_mode_is_enabled",),
    ("aoti_torch_empty_strided",),
    ("_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE"),
    ("aoti_torch_delete_tensor_object",),
)
GET_DTYPE = 3


class TorchTensors(entries.Tensors):
    """PyTorch's tensors in the host's memory.

    handle, keys: the places in bytes of the tensor in its Python object, and of the dispatch keys in the tensor.
    """

    kinds = KINDS

    def __init__(self, handle: int, keys: int):
        self.handle, self.keys = handle, keys
        objects_ = [sys.intern("requires_grad"), True, forward_ad.__dict__, sys.intern("_current_level"), -1]
        watchers = [each for pair in _watchers() for each in pair]
        kept_forever(*objects_, *watchers)
        functions = [_function(names) for names in NAMES]
        words = [handle, keys, *functions, *map(id, (*objects_, *watchers))]
        kept = (ctypes.c_int64 * len(words))(*words)
        kept_forever(kept)
        self.address = ctypes.addressof(kept)

    def layout(self, tensor: Any) -> Any:
        strides = tensor.stride() if tensor.layout is torch.strided else None
        return tensor.requires_grad, tensor.dtype, tensor.shape, strides

    def of_value(self, tensor: Any) -> list[int]:
        if tensor.device.type != "cpu" or not tensor.numel():
            raise NotNative
        records = torch.is_grad_enabled() and tensor.requires_grad
        keys = _words(tensor._cdata, self.keys // 8 + 1)[-1]
        layout = [tensor.dim(), *tensor.shape, *tensor.stride()]
        return [id(type(tensor)), keys, int(records), self.dtype(tensor), *layout]

    def of_result(self, tensor: Any) -> list[int]:
        return [self.dtype(tensor), -1, tensor.dim(), *tensor.shape, *tensor.stride()]

    def dtype(self, tensor: Any) -> int:
        """The number of its dtype in PyTorch's C interface. Raises NotNative if it cannot be read."""
        found = ctypes.c_int32()
        if _getter(NAMES[GET_DTYPE])(id(tensor) + self.handle, ctypes.addressof(found)):
            raise NotNative
        return found.value

    def is_plainly_made(self, make: Any) -> bool:
        return isinstance(make, functools.partial) and make.func is torch.empty_strided

    def watchers(self, tensors: Sequence[Any]) -> int:
        """All of them; that for autocast, which is the last, for half precision alone."""
        found = [each for each in tensors if type(each) in KINDS]
        return len(_watchers()) - HALF.isdisjoint(each.dtype for each in found) if found else 0


@functools.cache
def _watchers() -> list[tuple[Any, Any]]:
    """Functions, and what each returns where nobody has to know of a call."""
    return [
        (torch._C._len_torch_dispatch_stack, 0),
        (torch._C._is_tracing, False),
        (torch._C._are_functorch_transforms_active, False),
        (functools.partial(torch.is_autocast_enabled, "cpu"), False),
    ]


def note_effect() -> None:
    """Say that the call has an effect beside its answer, so that it stays Python's."""
    if not torch.compiler.is_compiling():
        functions.note_effect()


def is_watched() -> bool:
    """Whether a part of PyTorch has to know of every call now."""
    modes = torch_private.dispatch_modes() or torch_private.is_tracing()
    return bool(modes) or torch_private.transforms_active() or torch_private.is_forward_mode()


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


@functools.cache
def _libraries() -> list[ctypes.CDLL]:
    folder = Path(torch.__file__).parent / "lib"
    return [ctypes.CDLL(str(folder / name), mode=os.RTLD_NOLOAD) for name in LIBRARIES]


def _function(names: Sequence[str]) -> int:
    """The address of a function of PyTorch's that has one of these names. Raises AttributeError if there is none."""
    for library in _libraries():
        for name in names:
            if hasattr(library, name):
                return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    raise AttributeError(names[0])


@functools.cache
def _getter(names: Sequence[str]) -> Callable[[int, int], int]:
    """A function that writes something of a tensor to an address; whether it failed."""
    return ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(_function(names))


# --- where things lie in tensors -----------------------------------------------------------------------------------


def _examples() -> list[torch.Tensor]:
    """Tensors whose dispatch keys differ."""
    plain = torch.zeros(3, 4, device="cpu")
    with torch.inference_mode():
        inferred = torch.zeros(2, dtype=torch.int64, device="cpu")
    kinds = [plain, plain.t()[1:], torch._neg_view(plain), plain.to_sparse(), torch.empty(2, device="meta"), inferred]
    return [*kinds, torch.nn.Parameter(plain)]


def _place(words: Sequence[Sequence[int]], wanted: Sequence[int]) -> int:
    """The only place where each tensor has the word that is wanted of it, in bytes. Raises LookupError."""
    shortest = min(map(len, words))
    places = [i for i in range(shortest) if all(w[i] == x for w, x in zip(words, wanted, strict=True))]
    if len(places) != 1:
        raise LookupError
    return 8 * places[0]


def _found() -> TorchTensors:
    """What is known of this PyTorch, tried. Raises LookupError, AttributeError or OSError if something is missing."""
    tensors = _examples()
    impls = [tensor._cdata for tensor in tensors]
    handle = _place([_words(id(each), type(each).__basicsize__ // 8) for each in tensors], impls)
    raw = [torch._C._dispatch_keys(each).raw_repr() for each in tensors]
    signed = [word - ((word >> 63) << 64) for word in raw]
    found = TorchTensors(handle, _place([_words(impl, WORDS) for impl in impls], signed))
    if forward_ad.__dict__.get("_current_level") != -1 or not _is_right(found, tensors[1]):
        raise LookupError
    return found


def _is_right(found: TorchTensors, tensor: torch.Tensor) -> bool:
    """Whether the C functions tell of a tensor what Python does."""
    read = []
    for names in NAMES[:5]:
        word = ctypes.c_int64()
        if _getter(names)(id(tensor) + found.handle, ctypes.addressof(word)):
            return False
        read.append(word.value)
    rank, sizes, strides, _, data = read
    shape = tuple(_words(sizes, rank)), tuple(_words(strides, rank))
    return shape == (tuple(tensor.shape), tensor.stride()) and data == tensor.data_ptr()


_is_prepared = not SUPPORTED or not hasattr(os, "RTLD_NOLOAD")


def prepare() -> None:
    """Let entries be made of calls on tensors, if this PyTorch is as native code has to know it."""
    global _is_prepared
    if _is_prepared:
        return
    _is_prepared = True
    with contextlib.suppress(LookupError, AttributeError, OSError, RuntimeError):
        entries.know(_found())


F = TypeVar("F", bound=Callable[..., Any])


def native(python: F, watched: bool = True) -> F:
    """Decorate a function of tensors: calls that one operator answers are native from the second on.

    watched: whether PyTorch may have to know of a call.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return noted(known, python, args, kwargs, watched)

    function, known = function_of(call)
    return cast(F, functools.wraps(python)(function) if known else python)


def noted(
    known: Entries | None,
    python: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    watched: bool = True,
) -> Any:
    """python(*args, **kwargs), whose function is to know calls like this one natively if it has such entries.

    watched: whether PyTorch may have to know of the call.
    """
    if known is None or torch.compiler.is_compiling():
        return python(*args, **kwargs)
    return unseen(_noted)(known, python, args, kwargs, watched)


def _noted(
    known: Entries, python: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], watched: bool
) -> Any:
    if is_watched():
        return python(*args, **kwargs)
    prepare()
    return answer(known, python, args, kwargs, watched)


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch.compile leaves it alone: after a graph break it would compile what is called, too."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return function if dynamo is None else _hidden(dynamo, function)


@functools.cache
def _hidden(dynamo: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    hidden: Callable[..., Any] = dynamo.disable(function)
    return hidden
