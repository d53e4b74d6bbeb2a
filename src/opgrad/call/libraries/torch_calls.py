"""What native code needs of PyTorch in order to handle calls on tensors without Python.

`abi` describes the layout of tensors in memory. PyTorch's own functions tell whether a dispatch mode, a trace or a
transformation is active. If one of these functions is missing, or tensors have another layout than `abi` describes,
calls on tensors are left to Python.
"""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from opgrad.call import entries
from opgrad.call.calls import Torch, Watcher
from opgrad.call.entries import Answered, Entries, NotNative, function_of
from opgrad.call.libraries import torch_private
from opgrad.cpu.runtime import abi
from opgrad.cpu.runtime.abi import SUPPORTED, TensorLayout, kept_forever

HALF = frozenset({torch.float16, torch.bfloat16})
KINDS = frozenset({torch.Tensor, torch.nn.Parameter})  # plain tensors; other subclasses may behave differently


class TorchTensors:
    """How entries describe PyTorch's tensors in the host's memory."""

    kinds = KINDS
    empty = staticmethod(torch.empty_strided)  # makes what native code can make, too

    def __init__(self, found: TensorLayout):
        self.found = found
        pairs = [Watcher(*map(id, pair)) for pair in _watchers()]
        watchers = (Watcher * len(pairs))(*pairs)
        known = Torch(
            handle=found.handle,
            keys=found.keys,
            requires_grad=id(sys.intern("requires_grad")),
            true=id(True),
            levels=id(torch_private.forward_state),
            level=id(sys.intern("_current_level")),
            no_level=id(-1),
            watchers=ctypes.addressof(watchers),
            **found.functions,
        )
        kept_forever(known, watchers, _watchers(), torch_private.forward_state, "requires_grad", "_current_level")
        self.address = known.address

    def layout(self, tensor: Any) -> Any:
        """A hashable description of a tensor; tensors that differ in it need different entries."""
        strides = tensor.stride() if tensor.layout is torch.strided else None
        return tensor.requires_grad, tensor.dtype, tensor.shape, strides

    def of_value(self, tensor: Any) -> dict[str, int]:
        """The fields of a `calls.Value` for an argument, but for its layout."""
        if tensor.device.type != "cpu" or not tensor.numel():
            raise NotNative
        records = torch.is_grad_enabled() and tensor.requires_grad
        keys = abi.words(tensor._cdata + self.found.keys, 1)[0]
        return {"type": id(type(tensor)), "keys": keys, "records_grad": records}

    def sizes(self, tensor: Any) -> Sequence[int]:
        """Its sizes, then its strides."""
        return (*tensor.shape, *tensor.stride())

    def dtype(self, tensor: Any) -> int:
        """The number of its dtype in the library's C interface."""
        try:
            return self.found.read("get_dtype", tensor)
        except LookupError:
            raise NotNative from None

    def watchers(self, tensors: Sequence[Any]) -> int:
        """All of them; that for autocast, which is the last, for half precision alone."""
        found = [each for each in tensors if type(each) in KINDS]
        return len(_watchers()) - HALF.isdisjoint(each.dtype for each in found) if found else 0


_watchers = functools.cache(torch_private.watchers)


# --- how calls were answered ------------------------------------------------------------------------------------------


class _Notes(threading.local):
    """For each thread, what was run to answer the call that it is in; None if nobody wants to know.

    A call's answer comes back through PyTorch's autograd, which hands on tensors alone.
    """

    answered: list[Answered] | None = None


_notes = _Notes()


def note(answered: Answered) -> None:
    """Record how the call that this thread is in was answered, if that call collects such notes."""
    if _notes.answered is not None:
        _notes.answered.append(answered)


def note_effect() -> None:
    """Say that the call has an effect beside its answer, so that it stays Python's."""
    if not torch.compiler.is_compiling():
        note(Answered(None, (), (), False, None))


def answer_whole(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return function(*arguments), and note that this call is the answer; notes made inside it are ignored."""
    outside, _notes.answered = _notes.answered, None
    try:
        found = function(*arguments)
    finally:
        _notes.answered = outside
    note(Answered(function, arguments, found, True, found))
    return found


def is_watched() -> bool:
    """Whether a part of PyTorch has to know of every call now."""
    modes = torch_private.dispatch_modes() or torch_private.is_tracing()
    return bool(modes) or torch_private.transforms_active() or torch_private.is_forward_mode()


_is_prepared = not SUPPORTED or not hasattr(os, "RTLD_NOLOAD")


def prepare() -> None:
    """Let entries be made of calls on tensors, if this PyTorch is as native code has to know it."""
    global _is_prepared
    if _is_prepared:
        return
    _is_prepared = True
    if abi.unlike():
        return
    try:
        if not _watchers() or torch_private.forward_state.get("_current_level") is None:
            raise LookupError
        entries.know(TorchTensors(abi.tensor_layout(torch)))
    except (LookupError, AttributeError, OSError, RuntimeError):
        abi.warn(f"tensors of PyTorch {torch.__version__}")


F = TypeVar("F", bound=Callable[..., Any])


def native(python: F, watched: bool = True) -> F:
    """Decorate a function of tensors: calls that one operator answers are native from the second on.

    watched: whether PyTorch may have to know of a call.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return noted(its_entries, python, args, kwargs, watched)

    function, its_entries = function_of(call)
    return cast(F, functools.wraps(python)(function) if its_entries else python)


def noted(
    its_entries: Entries | None, python: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
    watched: bool = True,
) -> Any:  # fmt: skip
    """python(*args, **kwargs), whose function is to know calls like this one natively if it has such entries.

    watched: whether PyTorch may have to know of the call.
    """
    if its_entries is None or torch.compiler.is_compiling():
        return python(*args, **kwargs)
    return unseen(_noted)(its_entries, python, args, kwargs, watched)


def _noted(
    its_entries: Entries, python: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], watched: bool
) -> Any:
    """Make an entry for such calls if exactly one note says how this one was answered."""
    if is_watched():
        return python(*args, **kwargs)
    prepare()
    outside, _notes.answered = _notes.answered, []
    try:
        found, noted = python(*args, **kwargs), _notes.answered
    finally:
        _notes.answered = outside
    if len(noted) == 1:
        its_entries.enter(replace(noted[0], answer=found, watched=watched), args, kwargs)
    return found


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch.compile leaves it alone: after a graph break it would compile what is called, too."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return function if dynamo is None else _hidden(dynamo, function)


@functools.cache
def _hidden(dynamo: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    hidden: Callable[..., Any] = dynamo.disable(function)
    return hidden
