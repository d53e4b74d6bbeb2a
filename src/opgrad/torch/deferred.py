"""Deferred logits: what a model does to the result of its output layer is recorded and not computed.

A hook replaces the input of a linear layer by `_LayerInput`. PyTorch passes every function that is called with it to
its `__torch_function__`, where `functional.linear` returns a `Deferred`. Factors, sums of such logits and a softcap are
recorded. Any other operation computes the logits first, as the model would have done.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from opgrad.call.libraries.torch_tensors import PLAIN
from opgrad.torch.autocast import narrows_products


@dataclass(frozen=True)
class LinearTerm:
    """factor * linear(x, w, b)."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    factor: float = 1.0


@dataclass(frozen=True)
class LayerLogits:
    """softcap * tanh(y / softcap) / temperature for y = linear(x, w, b); without a softcap y / temperature."""

    x: Tensor
    w: Tensor
    b: Tensor | None
    softcap: float
    temperature: float


@dataclass(frozen=True)
class _Surroundings:
    """The modes in force when the layer was called, such as autocast and grad; the layer is computed under the same."""

    records: bool
    autocasts: bool
    autocast_dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "_Surroundings":
        kind = x.device.type
        return cls(torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    @contextlib.contextmanager
    def again(self, x: Tensor) -> Iterator[None]:
        with (
            torch.set_grad_enabled(self.records),
            torch.autocast(x.device.type, self.autocast_dtype, enabled=self.autocasts),
        ):
            yield


class Deferred:
    """The sum of its terms or, with `after`, after * tanh(the sum), in this dtype; in the place of a tensor.

    computed: the tensor, as soon as something has asked for it. From then on only it counts, since it may be changed in
    place.
    """

    def __init__(
        self, terms: Sequence[LinearTerm], after: float | None, dtype: torch.dtype, surroundings: _Surroundings
    ):
        self.terms, self.after, self.dtype, self.surroundings = tuple(terms), after, dtype, surroundings
        self.computed: Tensor | None = None

    @classmethod
    def of(cls, x: Tensor, w: Tensor, b: Tensor | None = None) -> "Deferred":
        around = _Surroundings.of(x)
        return cls([LinearTerm(x, w, b)], None, around.autocast_dtype if narrows_products(x) else x.dtype, around)

    def tensor(self) -> Tensor:
        """The logits."""
        if self.computed is None:
            with self.surroundings.again(self.terms[0].x):
                found = self._of_term(self.terms[0])
                for term in self.terms[1:]:
                    found = found + self._of_term(term)
                found = found if self.after is None else torch.tanh(found) * self.after
                self.computed = found.to(self.dtype)
        return self.computed

    @staticmethod
    def _of_term(term: LinearTerm) -> Tensor:
        found = functional.linear(term.x, term.w, term.b)
        return found if term.factor == 1.0 else found * term.factor

    def layer(self) -> LayerLogits | None:
        """The logits as one linear layer with a softcap and a temperature; None if they do not have this form."""
        first, after = self.terms[0], 1.0 if self.after is None else self.after
        if self.computed is not None or not (first.factor > 0 and after > 0):
            return None
        x, w, b = first.x, first.w, first.b
        for term in self.terms[1:]:  # a sum of products x @ w.T is one product of the concatenated x and w
            x = torch.cat([x, term.x.to(x.dtype) * (term.factor / first.factor)], -1)
            w = torch.cat([w, term.w.to(w.dtype)], -1)
            if term.b is not None:
                more = term.b * (term.factor / first.factor)
                b = more.to(w.dtype) if b is None else b + more
        softcap = 0.0 if self.after is None else 1 / first.factor
        return LayerLogits(x, w, b, softcap, 1 / (after * first.factor))

    def weights_are_there(self) -> bool:
        """Whether the memory of the layer's weights still exists; sharded training frees it after the layer's call."""
        if torch.compiler.is_compiling():
            return True
        plain = [term.w for term in self.terms if type(term.w) in PLAIN and term.w.numel()]
        return all(w.untyped_storage().nbytes() for w in plain)

    # --- what is noted ---

    def _noted(self, terms: Sequence[LinearTerm], after: float | None) -> "Deferred":
        return Deferred(terms, after, self.dtype, self.surroundings)

    def __mul__(self, other: Any) -> Any:
        if self.computed is not None or type(other) not in (int, float):
            return self.tensor() * _settled(other)
        if self.after is not None:
            return self._noted(self.terms, self.after * other)
        return self._noted([replace(term, factor=term.factor * other) for term in self.terms], None)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if self.computed is not None or type(other) not in (int, float) or not other:
            return self.tensor() / _settled(other)
        return self * (1 / other)

    def __add__(self, other: Any) -> Any:
        both = (self, other)
        if not all(isinstance(each, Deferred) and each.computed is None and each.after is None for each in both):
            return self.tensor() + _settled(other)
        return Deferred(
            (*self.terms, *other.terms), None, torch.promote_types(self.dtype, other.dtype), self.surroundings
        )

    def tanh(self) -> Any:
        if self.computed is not None or self.after is not None:
            return self.tensor().tanh()
        return self._noted(self.terms, 1.0)

    def to(self, *args: Any, **given: Any) -> Any:
        if self.computed is not None or given or len(args) != 1:
            return self.tensor().to(*args, **given)
        if args[0] in (self.device, self.dtype):
            return self
        if args[0] in {torch.promote_types(self.dtype, args[0]), *(term.w.dtype for term in self.terms)}:
            return Deferred(self.terms, self.after, args[0], self.surroundings)  # no digits are lost
        return self.tensor().to(*args)

    def float(self) -> Any:
        return self.to(torch.float32)

    def contiguous(self) -> Any:
        return self if self.computed is None else self.computed.contiguous()

    # --- a tensor for everybody else ---

    @property
    def device(self) -> torch.device:
        return self.terms[0].x.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.terms[0].x.shape[:-1], self.terms[0].w.shape[0]))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and isinstance(args[0], Deferred) and not kwargs:
            return args[0].tanh()
        return function(*map(_settled, args), **{name: _settled(each) for name, each in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)


def _settled(value: Any) -> Any:
    """The value with computed tensors in place of all deferred ones, also inside lists."""
    if isinstance(value, Deferred):
        return value.tensor()
    if isinstance(value, _LayerInput):
        return value.x
    return type(value)(map(_settled, value)) if type(value) in (list, tuple) else value


def _by_tensor(name: str) -> Callable[..., Any]:
    def method(self: Deferred, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*map(_settled, args))

    return method


# Python looks special methods up in the class. The special methods above record what they can.
for _name in (
    "getitem", "setitem", "len", "iter", "bool", "float", "int", "neg", "abs", "invert", "contains", "array", "sub",
    "rsub", "radd", "rtruediv", "floordiv", "mod", "pow", "rpow", "matmul", "rmatmul", "and", "or", "xor", "eq", "ne",
    "lt", "le", "gt", "ge",
):  # fmt: skip
    setattr(Deferred, f"__{_name}__", _by_tensor(f"__{_name}__"))
setattr(Deferred, "__hash__", object.__hash__)  # noqa: B010


class _LayerInput:
    """Stands for the input of a linear layer whose result shall be deferred."""

    def __init__(self, x: Tensor):
        self.x = x

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear and not kwargs and isinstance(args[0], _LayerInput):
            return Deferred.of(args[0].x, *args[1:])
        return function(*map(_settled, args), **{name: _settled(each) for name, each in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.x, name)


def deferred_input(x: Tensor) -> Any:
    """The object to pass to a linear layer in place of x."""
    return _LayerInput(x)
