"""Plans that users keep: calls checked and laid out once, then run on any arrays of the same shapes, dtypes, strides.

    plan = opgrad.plan(opgrad.softmax, x, post_ops=[opgrad.post_ops.clip(0.0, 0.5)], out=y)
    plan(x, out=y)

A call only looks at shapes, dtypes, strides and pointers; its working memory comes from the pool, where that of the
call before lies. Several threads may use one plan at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opgrad.call import arrays, owners
from opgrad.call.entries import Answered, Entries
from opgrad.contract import Array, Operator, Shape
from opgrad.cpu.runtime.abi import SUPPORTED, Function, native_type
from opgrad.ops import public_operators
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.primitive import STATE


class PlannedCall(Function):
    """What `plan` returns.

    implementation: which kernels run: the layout of the work and the precision of the computation.
    bytes_moved: the least traffic with memory: every input read once, every result written once.
    scratch_bytes: the working memory of each thread that is inside a call.
    """

    def __init__(self, op: Operator, given: dict[str, Any]):
        out, runner = given["out"], arrays.ArrayRunner(op, given)
        outputs = out if type(out) is tuple else (out,)
        self._op, self._runner = op, runner
        self._first = [name for name in op.arrays if name in op.parameters and given.get(name) is not None]
        # The arrays that calls do not bring, in the operator's order, with None for those that they do.
        self._bound = {name: None if name in self._first else given.get(name) for name in op.arrays}
        self._call = [(*_signature(given[name]), name) for name in self._first]
        self._call += [(*_signature(each), f"out for {name}") for each, name in zip(outputs, op.results, strict=True)]
        self.bytes_moved = runner.plan.problem.bytes
        self.scratch_bytes = runner.plan.scratch_bytes
        if SUPPORTED:
            self._python = self.__call__
            self._entries = Entries(self, self._python)
        self._enter({name: given[name] for name in self._first}, out)

    def _enter(self, inputs: dict[str, Array], out: Any) -> None:
        """Let calls on such arrays be native."""
        if SUPPORTED and not self._runner.copies:
            outputs, operands = out if type(out) is tuple else (out,), (self._bound | inputs).values()
            answered = Answered(self._runner, [*operands, *outputs], outputs, False, out, tuple(self._bound.values()))
            self._entries.enter(answered, tuple(inputs.values()), {"out": out})

    @property
    def implementation(self) -> str:
        return self._runner.plan.implementation

    def __call__(
        self, *inputs: Array, out: Array | tuple[Array, ...], where: Array | None = None,
        operands: Sequence[Any] | None = None, seed: int | None = None, offset: int | None = None,
    ) -> Any:  # fmt: skip
        """Run on NumPy arrays of the planned shapes, dtypes and strides; returns `out`.

        inputs: the arrays, in the operator's order. out: where to write; for several results a tuple.
        where, operands (of the post-ops, one after the other), seed, offset: in place of those that were planned.
        Raises TypeError or ValueError, before anything is written, for arrays that are not as planned, a read-only
        `out`, and an `out` that overlaps another array in a way that is not allowed.
        """
        replaced = self._replaced(where, operands, seed, offset)
        outputs: tuple[Any, ...] = out if type(out) is tuple else (out,)
        if len(inputs) != len(self._first) or len(outputs) != len(self._op.results):
            expected = f"{', '.join(self._first)} and {len(self._op.results)} for out"
            raise TypeError(f"{self._op.name}: {len(inputs)} arrays and {len(outputs)} for out, expected {expected}")
        self._check(inputs, outputs)
        given = dict(zip(self._first, inputs, strict=True))
        self._runner.computed([*(self._bound | replaced | given).values()], outputs)
        if not replaced:
            self._enter(given, out)
        return out

    def _check(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Raise unless the arrays are as planned."""
        for array, (shape, strides, dtype, name) in zip((*inputs, *outputs), self._call, strict=True):
            if type(array) is not np.ndarray:
                raise TypeError(f"{self._op.name}: {name} is {type(array).__name__}, expected a NumPy array")
            if array.dtype != dtype:
                raise TypeError(f"{self._op.name}: {name} has dtype {array.dtype}, expected {dtype}, as planned")
            if array.shape != shape:
                raise ValueError(f"{self._op.name}: {name} has shape {array.shape}, expected {shape}, as planned")
            if array.strides != strides:
                raise ValueError(f"{self._op.name}: {name} has strides {array.strides}, expected {strides}, as planned")
        arrays.check_writeable(self._op, outputs)

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name} {dtype.name} {shape}" for shape, _, dtype, name in self._call)
        return f"<opgrad plan of {self._op.name}: {inputs}; {self.implementation}>"

    def _replaced(
        self, where: Array | None, operands: Sequence[Any] | None, seed: int | None, offset: int | None
    ) -> dict[str, Array]:
        """The arrays that attributes bring in place of those that were planned."""
        replaced, shape = dict[str, Array](), self._call[0][0]
        if where is not None:
            replaced["where"] = self._as_planned("where", where, shape)
        if operands is not None:
            names = [name for name in self._bound if name.startswith("post_ops")]
            if len(operands) != len(names):
                raise ValueError(f"{self._op.name}: operands has {len(operands)} arrays, expected {len(names)}")
            replaced |= {name: self._as_planned(name, each, shape) for name, each in zip(names, operands, strict=True)}
        if seed is not None or offset is not None:
            planned: Any = self._bound.get(STATE)
            if planned is None:
                raise ValueError(f"{self._op.name}: seed is given, but no dropout is planned")
            new = Dropout(0.0, planned[0] if seed is None else seed, planned[1] if offset is None else offset)
            replaced[STATE] = new.words
        return replaced

    def _as_planned(self, name: str, array: Any, shape: Shape) -> Array:
        planned = self._bound.get(name)
        if planned is None:
            raise ValueError(f"{self._op.name}: {name} is given, but none is planned")
        found = np.broadcast_to(array, shape)
        if found.strides != planned.strides or found.dtype != planned.dtype:
            expected = f"{planned.dtype} with strides {planned.strides}, as planned"
            raise ValueError(
                f"{self._op.name}: {name} is {found.dtype} with strides {found.strides}, expected {expected}"
            )
        return found


_Planned = native_type(PlannedCall)


def _signature(array: Array) -> tuple[Shape, Shape, np.dtype[Any]]:
    return array.shape, array.strides, array.dtype


def plan(function: Callable[..., Any], *args: Any, **kwargs: Any) -> PlannedCall:
    """A plan for calls like this one: `plan(opgrad.relu_grad, dy, x, out=dx)`.

    function: an operator of this package. args, kwargs: the arguments of an example call, with NumPy arrays, `out`
    among them. Arrays that attributes bring (where, post-ops' operands) are used in every call.
    Raises what the call would raise, and TypeError without `out` or for another function.
    """
    op = public_operators().get(getattr(function, "__name__", ""))
    if op is None or getattr(function, "__wrapped__", None) is not op.reference:
        raise TypeError(f"plan: function is {function!r}, expected an operator of opgrad")
    given = arrays.namer(op)(args, kwargs)
    if given.get("out") is None:
        raise TypeError(f"plan: {op.name} has no out, expected an array to write to")
    foreign = owners.foreign(op, given)
    of, given = (op, given) if foreign else arrays.expanded(op, given)
    if of.finish is not None or foreign:
        raise NotImplementedError(f"plan: {op.name} with post_op_grads, or on other arrays than NumPy's, has no plan")
    return _Planned(of, arrays.as_given(of, given))
