"""Turns a softmax call with attributes into a call of an operator of its own.

`softmax(x, where=..., post_ops=[add(bias)], dropout=...)` has more arrays, and perhaps more results, than `softmax(x)`.
The functions here find the operator that such a call stands for: its inputs are all the arrays, broadcast to the
shape of x; its attributes are plain values. What else decides about the results stands among the call's arguments,
too, so that they are the key of its plan. `opgrad.cpu.programs.fusing` makes the programs of these operators.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from opgrad.contract import (
    BYTES,
    DTYPES,
    FLOAT8,
    FLOATS,
    Attributes,
    General,
    Operator,
    Shape,
    Shapes,
    Spec,
    Tensor,
    normalise,
    shaped_like,
    shown,
)
from opgrad.contract.arrangement import repeated_axes
from opgrad.contract.attributes import result_dtype
from opgrad.contract.declaration import HOST, NUMBERS, Arrays, is_masked, no_array
from opgrad.ops.reference import post_ops
from opgrad.ops.reference.dropout import Dropout
from opgrad.ops.reference.post_ops import PostOp

TYPES = FLOATS + FLOAT8 + BYTES  # of x and y
GRADIENT_TYPES = FLOATS + FLOAT8  # of dy, y and dx in the gradients
OPERAND_TYPES = (*TYPES, "int32")  # of post-ops' operands
CONDITION_TYPES = (*OPERAND_TYPES, "bool")

RANKS = range(1, 65)
SCALARS: Mapping[str, Any] = {"logit_scale": 1.0, "result_scale": 1.0, "out_scale": 1.0}
# The values of attributes with which a call is a plain one; an attribute that is not listed has the value False then.
DEFAULTS = {"accumulation": ("relaxed", "any"), **{name: (value,) for name, value in SCALARS.items()}}
FORWARD = (
    "out_dtype", "where", *SCALARS, "inf_as_zero", "dropout", "post_ops", "accumulation", "stats", "save",
)  # fmt: skip
GRADIENT = ("out_dtype", "where", *SCALARS, "dropout", "post_ops", "post_op_grads")
# The input that holds dropout's seed and offset. They change from call to call, and attributes are part of a plan.
STATE = "dropout's seed and offset"


class Applied(NamedTuple):
    """A post-op as an attribute of a problem; `operands` names the inputs of the operator that hold its operands."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0
    operands: tuple[str, ...] = ()


def over_arrays(given: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A call's arguments with `change(name, array)` for `where` and the post-ops' operands; numbers stay."""
    found = dict(given)
    if given.get("where") is not None and not isinstance(given["where"], NUMBERS):
        found["where"] = change("where", given["where"])
    several = given.get("post_ops")
    if isinstance(several, tuple | list):
        found["post_ops"] = [_with_operands(number, each, change) for number, each in enumerate(several)]
    return found


def _with_operands(number: int, op: Any, change: Callable[[str, Any], Any]) -> Any:
    if not isinstance(op, PostOp) or not op.operands:
        return op
    pairs = zip(operand_names(number, op), op.operands, strict=True)
    changed = (each if isinstance(each, NUMBERS) else change(name, each) for name, each in pairs)
    return replace(op, operands=tuple(changed))


# --- the forward operators -------------------------------------------------------------------------------------------


def expand_forward(op: Operator, given: dict[str, Any], library: Arrays) -> tuple[Operator, dict[str, Any]]:
    """softmax or log_softmax with attributes, with other dtypes than the four floats, or of mixed dtypes."""
    if given.get("x") is None:
        return op, _without(given, FORWARD)
    x = _spec(op, library, "x", given["x"])
    own = x.dtype if x.dtype.name not in BYTES else DTYPES["float32"]
    asked = result_dtype(f"{op.name}: out_dtype", given.get("out_dtype"), TYPES)
    dtype = asked or _dtype_of_out(op, library, given.get("out"), TYPES) or own
    if dtype == x.dtype and dtype.name in FLOATS and not _has_attributes(op, given, FORWARD):
        return op, _without(given, FORWARD)
    flags = {name: given.get(name, False) for name in ("inf_as_zero", "stats", "save")}
    normalise(op, flags, {})
    values, applied = _put_together(op, library, given, x, "x")
    dropout = given.get("dropout")
    results = (
        dtype.name,
        "float32" if flags["stats"] else None,
        own.name if flags["save"] else None,
        "bool" if dropout is not None and dropout.mask else None,
    )
    values |= {name: given[name] for name in ("accumulation",) if name in given} | flags
    values |= {"out_dtype": dtype, "mask": results[-1] is not None}
    return _forward(op, applied, "where" in values, dropout is not None, results), values


@functools.lru_cache(1024)
def _forward(
    op: Operator, applied: tuple[Applied, ...], masked: bool, drops: bool, dtypes: tuple[str | None, ...],
) -> Operator:  # fmt: skip
    names = zip(("y", "stats", "saved", "mask"), dtypes, strict=True)
    results = {name: shaped_like("x", (dtype,)) for name, dtype in names if dtype}
    if "stats" in results:
        results["stats"] = replace(results["stats"], shape=_rows, as_in="the shape of x with 1 for axis", role="alone")
    attributes = {"inf_as_zero": False, "accumulation": "any", "stats": False, "save": False}
    inputs = {"x": Tensor(TYPES, ranks=RANKS)} | _inputs("x", applied, masked, drops)
    return _operator(op, inputs, results, attributes, in_place={"y": ("x",)})


# --- the gradients ---------------------------------------------------------------------------------------------------


def expand_gradient(op: Operator, given: dict[str, Any], library: Arrays) -> tuple[Operator, dict[str, Any]]:
    """softmax_grad or log_softmax_grad with the forward operator's attributes, or of mixed dtypes."""
    if given.get("dy") is None or given.get("y") is None:
        return op, _without(given, GRADIENT)
    dy, y = (_spec(op, library, name, given[name]) for name in ("dy", "y"))
    asked = result_dtype(f"{op.name}: out_dtype", given.get("out_dtype"), GRADIENT_TYPES)
    dtype = asked or _dtype_of_out(op, library, given.get("out"), GRADIENT_TYPES) or dy.dtype
    if dy.dtype == y.dtype == dtype and dtype.name in FLOATS and not _has_attributes(op, given, GRADIENT):
        return op, _without(given, GRADIENT)
    flags = {"post_op_grads": given.get("post_op_grads", False)}
    normalise(op, flags, {})
    values, applied = _put_together(op, library, given, dy, "dy")
    for number, each in enumerate(applied):
        if not post_ops.has_gradient(each.name):
            raise ValueError(f"{op.name}: post_ops[{number}] is {each.name}, which has no gradient")
    wanted: tuple[Any, ...] = ()
    if flags["post_op_grads"]:
        if given.get("out") is not None:
            raise TypeError(f"{op.name}: out is given, expected None with post_op_grads")
        shapes = _operand_specs(library, given.get("post_ops", ()))
        wanted = tuple((name, *shapes[name]) for each in applied for name in each.operands[-1:] if name in shapes)
    values |= {"out_dtype": dtype, "post_op_grads": wanted}
    drops = given.get("dropout") is not None
    return _gradient(op, applied, "where" in values, drops, dtype.name, wanted, library), values


@functools.lru_cache(1024)
def _gradient(
    op: Operator, applied: tuple[Applied, ...], masked: bool, drops: bool, dtype: str,
    wanted: tuple[tuple[str, Shape, str], ...], library: Arrays,
) -> Operator:  # fmt: skip
    results = {"dx": shaped_like("dy", (dtype,))}
    precise = "float64" if dtype == "float64" else "float32"
    results |= {gradient_name(name): shaped_like("dy", (precise,)) for name, _, _ in wanted}
    inputs = {"dy": Tensor(GRADIENT_TYPES, ranks=RANKS), "y": shaped_like("dy", GRADIENT_TYPES, ranks=RANKS)}
    inputs |= _inputs("dy", applied, masked, drops)
    operands = tuple((shape, dtype) for _, shape, dtype in wanted)
    finish = functools.partial(_summed, library, operands) if wanted else None
    return _operator(op, inputs, results, {}, in_place={"dx": ("dy", "y")}, finish=finish)


def gradient_name(operand: str) -> str:
    """The name of the result that holds the gradient of a post-op's operand, for each element."""
    return f"gradient of {operand}"


def _operand_specs(library: Arrays, several: Any) -> dict[str, tuple[Shape, str]]:
    """The shapes and dtypes of floating-point operands as they were given, by input name."""
    found = {}
    for number, each in enumerate(several):
        spec = library.spec(each.operands[-1]) if each.operands else None
        if spec is not None and spec.dtype.name in GRADIENT_TYPES:
            found[operand_names(number, each)[-1]] = (spec.shape, spec.dtype.name)
    return found


def _summed(library: Arrays, operands: tuple[tuple[Shape, str], ...], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """dx, and the operands' gradients summed to their shapes in float64."""
    sums = []
    for (shape, dtype), full in zip(operands, results[1:], strict=True):
        sums.append(library.total(full, repeated_axes(shape, tuple(full.shape)), shape, dtype))
    return (results[0], *sums)


# --- what they share -------------------------------------------------------------------------------------------------


def _rows(shapes: Shapes, attributes: Attributes) -> Shape:
    return tuple(1 if axis in attributes["axis"] else size for axis, size in enumerate(shapes["x"]))


def _operator(
    op: Operator, inputs: Mapping[str, Tensor], results: Mapping[str, Tensor], attributes: Mapping[str, Any],
    in_place: Mapping[str, tuple[str, ...]], finish: Callable[[tuple[Any, ...]], Any] | None = None,
) -> Operator:  # fmt: skip
    attributes = {"axis": -1, **SCALARS, "dropout": None, "post_ops": (), **attributes}
    declared: dict[str, Any] = {"onnx": (), "optional": frozenset(), "general": None, "instead": {}}
    return replace(
        op, kind="blocks", in_place=in_place, inputs=inputs, attributes=attributes, results=results, finish=finish,
        **declared,
    )  # fmt: skip


def _inputs(first: str, applied: tuple[Applied, ...], masked: bool, drops: bool) -> dict[str, Tensor]:
    """The arrays of attributes: the mask, dropout's state, the operands."""
    found = {"where": shaped_like(first, ("bool",))} if masked else {}
    if drops:
        found[STATE] = Tensor(("int64",), lambda shapes, _: (2,), "two numbers", role="alone")
    for each in applied:
        for place, name in enumerate(each.operands):
            condition = each.name == "select" and place == 0
            found[name] = shaped_like(first, CONDITION_TYPES if condition else OPERAND_TYPES)
    return found


def _has_attributes(op: Operator, given: Mapping[str, Any], keywords: tuple[str, ...]) -> bool:
    """Whether a keyword besides out_dtype has another value than its default. Raises as `normalise` does."""
    for name in (each for each in keywords if each in given and each != "out_dtype"):
        value = given[name]
        if name == "post_ops":
            if _chain(op, value):
                return True
        elif name in ("where", "dropout"):
            if value is not None:
                return True
        else:
            normalise(op, checked := {name: value}, {})
            if checked[name] not in DEFAULTS.get(name, (False,)):
                return True
    return False


def _without(given: dict[str, Any], keywords: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in keywords}


def _put_together(
    op: Operator, library: Arrays, given: Mapping[str, Any], like: Spec, first: str
) -> tuple[dict[str, Any], tuple[Applied, ...]]:
    """The call's arguments by the names of the operator that computes it, and its post-ops."""
    chain, dropout = _chain(op, given.get("post_ops", ())), given.get("dropout")
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(f"{op.name}: dropout is {shown(dropout)}, expected an opgrad.Dropout")
    kept = (*op.inputs, "axis", "out", *SCALARS)
    values = {name: given[name] for name in kept if name in given}
    applied = []
    if given.get("where") is not None:
        values["where"] = _broadcast(op, library, "where", given["where"], like, values[first])
    if dropout is not None:
        values[STATE] = library.state(dropout.words, values[first])
        values["dropout"] = dropout.probability
    for number, each in enumerate(chain):
        names = operand_names(number, each)
        for name, operand in zip(names, each.operands, strict=True):
            values[name] = _broadcast(op, library, name, operand, like, values[first])
        applied.append(Applied(each.name, each.alpha, each.beta, names))
    values["post_ops"] = tuple(applied)
    return values, tuple(applied)


def _chain(op: Operator, several: Any) -> list[PostOp]:
    if not isinstance(several, tuple | list):
        raise TypeError(f"{op.name}: post_ops is {type(several).__name__}, expected a list of opgrad.post_ops")
    for number, each in enumerate(several):
        if not isinstance(each, PostOp):
            raise TypeError(f"{op.name}: post_ops[{number}] is {shown(each)}, expected one of opgrad.post_ops")
    if len(several) > post_ops.LIMIT:
        raise ValueError(f"{op.name}: post_ops has {len(several)} operations, expected at most {post_ops.LIMIT}")
    return list(several)


def operand_names(number: int, op: PostOp) -> tuple[str, ...]:
    """The inputs that hold an operation's operands."""
    if op.name == "select":
        return f"post_ops[{number}]'s condition", f"post_ops[{number}]'s other"
    return (f"post_ops[{number}]'s operand",) * len(op.operands)


def _spec(op: Operator, library: Arrays, name: str, array: Any) -> Spec:
    """The shape and dtype of an argument. Raises TypeError for what is no array."""
    if is_masked(array):
        raise TypeError(f"{op.name}: {name} is a masked array, expected an array without a mask")
    try:
        return library.spec(array)
    except Exception as error:  # a foreign __array__ may raise anything
        if isinstance(error, TypeError) and library is not HOST:
            raise
        raise no_array(f"{op.name}: {name}", array, error) from error


def _broadcast(op: Operator, library: Arrays, name: str, array: Any, like: Spec, beside: Any) -> Any:
    shape = _spec(op, library, name, array).shape
    try:
        return library.broadcast(array, like.shape, beside)
    except ValueError:
        raise ValueError(f"{op.name}: {name} has shape {shape}, expected one that broadcasts to {like.shape}") from None
    except OverflowError:
        raise ValueError(f"{op.name}: {name} is {shown(array)}, expected a number that float64 holds") from None


def _dtype_of_out(op: Operator, library: Arrays, out: Any, allowed: tuple[str, ...]) -> np.dtype[Any] | None:
    """The dtype of the first array in `out`; None if there is none, or what no call takes for one."""
    first = out[0] if isinstance(out, tuple) and out else out
    if not (isinstance(first, np.ndarray) or library.owns(first)):
        return None
    dtype = library.spec(first).dtype
    if dtype.name not in allowed or not dtype.isnative:
        name = next(iter(op.results))
        raise TypeError(f"{op.name}: out for {name} has dtype {dtype}, expected one of {', '.join(allowed)}")
    return dtype


SOFTMAX = General(FORWARD, expand_forward, over_arrays, by_keywords=True)
SOFTMAX_GRAD = General(GRADIENT, expand_gradient, over_arrays, by_keywords=True)
