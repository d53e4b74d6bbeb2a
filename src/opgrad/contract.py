"""What the declaration of an operator holds, and the checks that follow from it.

An operator is declared once, as a NumPy function in `opgrad.ops`: its signature is the interface, its body
the float64 reference, its docstring the documentation. The annotations say which dtypes and shapes each
array may have; the decorator adds what Python cannot say.
"""

import functools
import importlib
import importlib.util
import inspect
import math
import operator as arithmetic
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

FLOATS = ("float32", "float64", "float16", "bfloat16")
FLOAT8 = ("float8_e5m2", "float8_e4m3fn")
BYTES = ("int8", "uint8")
INTEGERS = ("int32", "int64")
FAMILIES = ("softmax", "cross_entropy", "activation", "gather", "accumulate")
# Operators that training graphs contain beside those: for NumPy arrays and ONNX Runtime on the CPU.
GRAPH_FAMILIES = (
    *("gelu", "dropout", "attention", "loss", "arithmetic", "normalization"),
    *("convolution", "pooling", "scatter", "several", "optimizer"),
)
NEEDS = "needs"  # the keyword of operators that can leave results out
REDUCTIONS = ("none", "mean", "sum")
ACCUMULATIONS = ("strict", "relaxed", "any")
# What float() takes, but is no number here.
NO_NUMBERS = (str, bytes, bytearray, complex, np.complexfloating, np.ma.MaskedArray)
MOST_ELEMENTS = 1 << 59  # bytes of an array are counted in int64
LONGEST = 120  # characters of a value in a message
DTYPES = {name: np.dtype(name) for name in ("float32", "float64", "float16", *BYTES, *INTEGERS, "bool")} | {
    name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", *FLOAT8)
}

Array = NDArray[Any]
Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Attributes = dict[str, Any]
# What the loops run over: single elements, rows along `axis`, the classes on axis 1, slices named by indices, or
# blocks of rows that go through stages; "whole": the kernel itself decides, from the shapes of contiguous arrays.
Kind = Literal["elements", "rows", "classes", "slices", "blocks", "whole"]


@dataclass(frozen=True)
class Spec:
    """An array as the checks see it; `strides` in bytes, None for C order."""

    shape: Shape
    dtype: np.dtype[Any]
    strides: Shape | None = None


@dataclass(frozen=True)
class Tensor:
    """What an array argument or a result may be.

    `shape` computes the one allowed shape from those of the arrays before it and the attributes (None: any);
    `as_in` is the end of the message, `dtype_of` the argument whose dtype this one must have; a result that may not
    have that dtype has the first of its own, unless `out_dtype` asks for another. `role`: it has an entry for each
    element of the first array, for each sample of it (without axis 1), or stands by itself. `several`: it stands for
    any number of arrays, see `spread`.
    """

    dtypes: tuple[str, ...]
    shape: Callable[..., Shape] | None = None
    as_in: str = ""
    dtype_of: str | None = None
    ranks: range = range(65)
    role: Literal["element", "sample", "alone"] = "element"
    several: bool = False


@dataclass(frozen=True)
class OnnxName:
    """An ONNX operator of domain com.microsoft that computes this operator.

    `inputs` and `outputs` name parameters in ONNX order, with a "?" behind optional ones and a "*" behind
    the last if it stands for any number; an attribute's name there is an input whose value is needed (a tensor in CPU
    memory). `attributes` holds the ONNX attributes with the original defaults. `until_13`: axis k stands for the axes
    from k to the last. `types` gives inputs that share a dtype one letter, and inputs read as attributes the dtypes
    that they come in; without it all float arrays share one. `origin` is the domain of the original if it is another.
    `overwrites`: results that are written over an input, whose memory the caller keeps.
    `shape_of` names the result whose shape, as the graph declares it, is the attribute `shape`.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    until_13: bool = False
    types: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    origin: str = "com.microsoft"
    overwrites: Mapping[str, str] = field(default_factory=dict)
    shape_of: str | None = None


@dataclass(frozen=True)
class General:
    """What an operator takes beyond its plain form, and how such a call becomes an operator of its own.

    `keywords` are the parameters of the function that the plain form lacks. `expand` returns, for a call's arguments
    by name, the operator that computes it and the arguments by that operator's names; the operator itself for a
    call in its plain form. `over_arrays` returns the arguments with `change(name, array)` for each array among the
    keywords, by the names that messages give them.
    """

    keywords: tuple[str, ...]
    expand: Callable[["Operator", dict[str, Any]], tuple["Operator", dict[str, Any]]]
    over_arrays: Callable[[Mapping[str, Any], Callable[[str, Any], Any]], dict[str, Any]]


@dataclass(frozen=True, eq=False)
class Operator:
    """One declared operator, or the form that a call in general takes of it."""

    name: str
    family: str
    kind: Kind
    formula: str
    reference: Callable[..., Any]
    forward: str | None
    onnx: tuple[OnnxName, ...]
    in_place: Mapping[str, tuple[str, ...]]
    inputs: Mapping[str, Tensor]
    optional: frozenset[str]
    attributes: Mapping[str, Any]
    parameters: tuple[str, ...]
    results: Mapping[str, Tensor]
    types: Mapping[str, Any] = field(default_factory=dict)  # the annotations of the attributes
    general: General | None = None
    finish: Callable[[tuple[Any, ...]], Any] | None = None  # makes what the function returns of the results

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the array arguments, in order."""
        return tuple(self.inputs)

    def has_kernel(self, backend: str) -> bool:
        """Whether there is a kernel for a backend; its file is read, for what it imports may not be installed."""
        try:
            found = importlib.util.find_spec(f"opgrad.{backend}.{self.family}")
        except ModuleNotFoundError:
            return False
        if found is None or found.origin is None:
            return False
        return f"\ndef {self.name}(" in Path(found.origin).read_text(encoding="utf-8")

    def kernel(self, backend: str = "cpu") -> Callable[..., Any]:
        """The function of the same name in the backend's file, or folder, of the same family.

        Raises NotImplementedError if there is none.
        """
        module = f"opgrad.{backend}.{self.family}"
        try:
            found = getattr(importlib.import_module(module), self.name, None)
        except ModuleNotFoundError as error:
            if not module.startswith(error.name or "?"):
                raise
            found = None
        if found is None:
            message = f"{self.name}: no kernel for {backend}; it would stand in opgrad/{backend}/{self.family}.py"
            raise NotImplementedError(message)
        return typing.cast(Callable[..., Any], found)


_declared: dict[str, Operator] = {}


def reference(name: str) -> Callable[..., Any]:
    """The float64 reference of a declared operator."""
    return _declared[name].reference


def operators() -> dict[str, Operator]:
    """The operators that every front end and device has, by name, in the order of the documentation."""
    return _of(FAMILIES)


def graph_operators() -> dict[str, Operator]:
    """The other operators of training graphs, which NumPy and ONNX Runtime have on the CPU."""
    return _of(GRAPH_FAMILIES)


def _of(families: tuple[str, ...]) -> dict[str, Operator]:
    for family in families:
        importlib.import_module(f"opgrad.ops.{family}")
    chosen = {name: op for name, op in _declared.items() if op.family in families}
    return dict(sorted(chosen.items(), key=lambda item: families.index(item[1].family)))


F = TypeVar("F", bound=Callable[..., Any])


def operator(
    formula: str,
    *,
    kind: Kind,
    results: Mapping[str, Tensor],
    forward: str | None = None,
    onnx: tuple[OnnxName, ...] = (),
    in_place: Mapping[str, tuple[str, ...]] | None = None,
    general: General | None = None,
) -> Callable[[F], F]:
    """Declare an operator: the function becomes the reference, and a front end of the same signature replaces it.

    `in_place` maps a result to the arguments whose memory it may take over.
    """

    def declare(function: F) -> F:
        declared = _declaration(function, kind, formula, results, forward, onnx, in_place or {}, general)
        _declared[declared.name] = declared
        return typing.cast(F, functools.wraps(function)(_front_end[0](declared)))

    return declare


_front_end: list[Callable[[Operator], Callable[..., Any]]] = []


def answer_with(dispatcher: Callable[[Operator], Callable[..., Any]]) -> None:
    """Name what makes the public function of each operator that is declared from now on."""
    _front_end[:] = [dispatcher]


def _declaration(
    function: Callable[..., Any],
    kind: Kind,
    formula: str,
    results: Mapping[str, Tensor],
    forward: str | None,
    onnx: tuple[OnnxName, ...],
    in_place: Mapping[str, tuple[str, ...]],
    general: General | None,
) -> Operator:
    hints = typing.get_type_hints(function, include_extras=True)
    signature = inspect.signature(function)
    plain = [p for name, p in signature.parameters.items() if general is None or name not in general.keywords]
    inputs = {p.name: found for p in plain if (found := _tensor(hints[p.name])) is not None}
    rest = [p for p in plain if p.name not in inputs and p.name != "out"]
    return Operator(
        name=function.__name__,
        family=function.__module__.rpartition(".")[2],
        kind=kind,
        formula=formula,
        reference=function,
        forward=forward,
        onnx=onnx,
        in_place=in_place,
        inputs=inputs,
        optional=frozenset(name for name in inputs if signature.parameters[name].default is None),
        attributes={p.name: p.default for p in rest},
        types={p.name: hints[p.name] for p in rest},
        parameters=tuple(p.name for p in plain),
        results=results,
        general=general,
    )


def _tensor(hint: Any) -> Tensor | None:
    """The Tensor inside an annotation such as `Floats` or `Floats | None`."""
    for option in (hint, *typing.get_args(hint)):
        if typing.get_origin(option) is Annotated:
            for extra in option.__metadata__:
                if isinstance(extra, Tensor):
                    return extra
    return None


# --- operators on any number of arrays -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)  # building it takes longer than a small call
def spread(op: Operator, given: int, made: int) -> Operator:
    """The operator for so many arrays in place of its last input, if that is several, and results likewise.

    They are named NAME[0], NAME[1], …; a several result's shape is computed with the keyword `index`.
    """

    def replaced(tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            each = {f"{name}[{i}]": _indexed(tensor, i) for i in range(count)} if tensor.several else {name: tensor}
            found |= each
        return found

    inputs, results = replaced(op.inputs, given), replaced(op.results, made)
    shared = {
        f"{result}[{i}]": tuple(f"{name}[{i}]" for name in names)
        for result, names in op.in_place.items()
        for i in range(made)
    }
    rest = [name for name in op.parameters if name not in op.inputs]
    return replace(op, inputs=inputs, results=results, parameters=(*inputs, *rest), in_place=shared, general=None)


def _indexed(tensor: Tensor, index: int) -> Tensor:
    shape = tensor.shape and functools.partial(tensor.shape, index=index)
    model = tensor.dtype_of and tensor.dtype_of.replace("[]", f"[{index}]")
    return replace(tensor, shape=shape, dtype_of=model, several=False)


def several(made: Callable[[Operator, Mapping[str, Any], int], int] = lambda op, given, count: 0) -> General:
    """What an operator with lists of arrays takes, all equally long; `made` gives the length of lists that it returns.

    It is given the operator, the arguments, not checked yet, and the length of the lists, 1 if there is none.
    """

    def expand(op: Operator, given: dict[str, Any]) -> tuple[Operator, dict[str, Any]]:
        flat, count = dict(given), 1
        lists = [name for name, tensor in op.inputs.items() if tensor.several]
        for name in lists:
            arrays = flat.pop(name)
            count = _length(op, name, arrays, lists[0], count)
            flat |= {f"{name}[{i}]": array for i, array in enumerate(arrays)}
        results = made(op, given, count)
        if not results:
            return spread(op, count, 0), flat
        if isinstance(flat.get("out"), list | tuple):
            flat["out"] = _flattened(flat["out"])
        return _making_lists(op, count, results), flat

    def over_arrays(given: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
        return {
            name: [change(f"{name}[{i}]", array) for i, array in enumerate(value)] if isinstance(value, list) else value
            for name, value in given.items()
        }

    return General((), expand, over_arrays)


@functools.lru_cache(maxsize=256)
def _making_lists(op: Operator, given: int, made: int) -> Operator:
    return replace(spread(op, given, made), finish=functools.partial(_in_lists, len(op.results)))


def _length(op: Operator, name: str, arrays: Any, first: str, expected: int) -> int:
    """The length of a list of arrays, which must be that of the first one."""
    if not isinstance(arrays, list | tuple):
        raise TypeError(f"{op.name}: {name} is {type(arrays).__name__}, expected a list of arrays")
    if not arrays:
        raise ValueError(f"{op.name}: {name} is empty, expected at least one array")
    if name != first and len(arrays) != expected:
        raise ValueError(f"{op.name}: {name} has {len(arrays)} arrays, expected {expected}, as many as {first}")
    return len(arrays)


def _flattened(out: Any) -> Any:
    """Arrays for results, in lists or not, as the plain form takes them: a tuple, or the only one."""
    flat = tuple(array for each in out for array in (each if isinstance(each, list | tuple) else [each]))
    return flat[0] if len(flat) == 1 else flat


def _in_lists(lists: int, results: tuple[Any, ...]) -> Any:
    """The results as a list, or as so many lists of one length."""
    if lists == 1:
        return list(results)
    length = len(results) // lists
    return tuple(list(results[start : start + length]) for start in range(0, len(results), length))


# --- operators of whose results a call may want only some ----------------------------------------------------------


def only(op: Operator, needs: Sequence[str]) -> Operator:
    """The operator with these results alone, in its own order."""
    return replace(op, results={name: tensor for name, tensor in op.results.items() if name in needs}, general=None)


def choosing() -> General:
    """What an operator takes that can leave results out: the keyword `needs` names those that it shall compute."""

    def expand(op: Operator, given: dict[str, Any]) -> tuple[Operator, dict[str, Any]]:
        needs = given.get(NEEDS)
        if needs is None:
            return op, given
        known = isinstance(needs, tuple | list) and all(isinstance(each, str) and each in op.results for each in needs)
        if not known or not needs:
            expected = f"some of {', '.join(op.results)} in a tuple"
            raise ValueError(f"{op.name}: {NEEDS} is {shown(needs)}, expected {expected}")
        return only(op, needs), given

    def over_arrays(given: Mapping[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
        return dict(given)

    return General((NEEDS,), expand, over_arrays)


# --- checks: every message names the operator, the argument, what it is and what was expected ----------------------


def check_arrays(op: Operator, specs: Mapping[str, Spec | None], attributes: Attributes) -> None:
    """Raise TypeError or ValueError unless the arrays are what the declaration asks for."""
    for name, tensor in op.inputs.items():
        spec = specs[name]
        if spec is None:
            if name not in op.optional:
                raise TypeError(f"{op.name}: {name} is None, expected an array")
            continue
        _check_dtype(op, name, spec, tensor, specs)
    shapes = {name: spec.shape for name, spec in specs.items() if spec is not None}
    for name, shape in shapes.items():
        tensor = op.inputs[name]
        if len(shape) not in tensor.ranks:
            low = f"at least {tensor.ranks.start}" if tensor.ranks.stop > 64 else str(tensor.ranks.start)
            raise ValueError(f"{op.name}: {name} has {_dimensions(len(shape))}, expected {low}")
    normalise(op, attributes, shapes)
    for name, shape in shapes.items():
        tensor = op.inputs[name]
        expected = tensor.shape and tensor.shape(shapes, attributes)
        if expected is not None and shape != expected:
            raise ValueError(f"{op.name}: {name} has shape {shape}, expected {expected}, {tensor.as_in}")


def _dimensions(rank: int) -> str:
    return f"{rank} dimension{'' if rank == 1 else 's'}"


def _check_dtype(op: Operator, name: str, spec: Spec, tensor: Tensor, specs: Mapping[str, Spec | None]) -> None:
    if not spec.dtype.isnative:
        raise TypeError(f"{op.name}: {name} has dtype {spec.dtype} in foreign byte order, expected native byte order")
    if spec.dtype.name not in tensor.dtypes:
        expected = ", ".join(tensor.dtypes)
        raise TypeError(f"{op.name}: {name} has dtype {spec.dtype.name}, expected one of {expected}")
    model = specs[tensor.dtype_of] if tensor.dtype_of else None
    if model is not None and model.dtype != spec.dtype:
        expected = f"{model.dtype.name}, the dtype of {tensor.dtype_of}"
        raise TypeError(f"{op.name}: {name} has dtype {spec.dtype.name}, expected {expected}")


def normalise(op: Operator, attributes: Attributes, shapes: Shapes) -> None:
    """Check the attributes and bring them, in place, to one form: axis to a range, dtypes to np.dtype."""
    for name, value in attributes.items():
        if isinstance(value, str) and type(value) is not str:
            value = attributes[name] = str.__str__(value)  # an enumeration's own form of it is another
        kind = op.types.get(name)
        check = _ATTRIBUTES.get(name) or (_BY_TYPE[kind](name) if kind in _BY_TYPE else None)
        if check is not None:
            attributes[name] = check(op, value, shapes, attributes)


def shown(value: Any) -> str:
    """A value as messages show it: in one line of bounded length, whatever it is."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # its own, or that of a number with too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def integer(op: Operator, name: str, value: Any) -> int:
    """A number that int64 holds; a bool is none."""
    wrong = f"{op.name}: {name} is {shown(value)}, expected"
    if isinstance(value, bool):
        raise TypeError(f"{wrong} an int")
    try:
        found = arithmetic.index(value)
    except Exception:  # a foreign __index__ may raise anything
        raise TypeError(f"{wrong} an int") from None
    if not -(2**63) <= found < 2**63:
        raise ValueError(f"{wrong} a 64-bit integer")
    return found


def integers(op: Operator, name: str, value: Any) -> Shape:
    """A tuple of such numbers, from a tuple, a list or an array."""
    try:
        # PyTorch's own list takes no NumPy view of a tensor's memory, which would keep it from being resized.
        array = value if isinstance(value, tuple | list) or hasattr(value, "tolist") else np.asarray(value)
        found = array if isinstance(array, tuple | list) else array.tolist()
    except Exception:  # a foreign __array__ may raise anything
        found = None
    if not isinstance(found, tuple | list):
        raise TypeError(f"{op.name}: {name} is {shown(value)}, expected a tuple of ints")
    return tuple(integer(op, name, each) for each in found)


def flag(op: Operator, name: str, value: Any) -> bool:
    """A bool, Python's or NumPy's."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op.name}: {name} is {shown(value)}, expected a bool")
    return bool(value)


def read_axes(op: Operator, value: Any) -> int | tuple[int, ...]:
    """An axis, or a tuple of them, as Python's integers."""
    return integers(op, "axis", value) if isinstance(value, tuple) else integer(op, "axis", value)


def _axis(op: Operator, value: Any, shapes: Shapes, attributes: Attributes) -> range:
    """The named axes as a range; a tuple must name adjacent axes."""
    rank = len(attributes.get("shape", next(iter(shapes.values()))))
    if op.kind in ("slices", "whole"):
        value = integer(op, "axis", value)
    named = read_axes(op, value)
    axes = named if isinstance(named, tuple) else (named,)
    for axis in axes:
        if not -rank <= axis < rank:
            bounds = f"{-rank} to {rank - 1}" if rank else "an array of at least one dimension"
            raise ValueError(f"{op.name}: axis is {named}, expected {bounds} for an array of {_dimensions(rank)}")
    found = sorted(axis % rank for axis in axes)
    if not found or found != list(range(found[0], found[0] + len(found))):
        raise ValueError(f"{op.name}: axis is {named}, expected an int or a tuple of adjacent axes")
    return range(found[0], found[-1] + 1)


def _one_of(op: Operator, name: str, value: Any, names: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{op.name}: {name} is {shown(value)}, expected one of {', '.join(names)}")
    return str(value)


def _reduction(op: Operator, value: Any, shapes: Shapes, attributes: Attributes) -> str:
    return _one_of(op, "reduction", value, REDUCTIONS)


def _ignore_index(op: Operator, value: Any, shapes: Shapes, attributes: Attributes) -> int | None:
    return None if value is None else integer(op, "ignore_index", value)


def _out_dtype(op: Operator, value: Any, shapes: Shapes, attributes: Attributes) -> Any:
    """A dtype for all results, or a tuple with one for each; None stands for the result's own."""
    if not isinstance(value, tuple):
        return _float_dtype(op, "out_dtype", value)
    if len(op.results) == 1:
        raise TypeError(f"{op.name}: out_dtype is {shown(value)}, expected one of {', '.join(FLOATS)}")
    if len(value) != len(op.results):
        raise TypeError(f"{op.name}: out_dtype is {shown(value)}, expected one dtype or a tuple of {len(op.results)}")
    return tuple(_float_dtype(op, f"out_dtype for {name}", each) for name, each in zip(op.results, value, strict=True))


def _float_dtype(op: Operator, what: str, value: Any) -> np.dtype[Any] | None:
    if value is None:
        return None
    try:
        dtype = DTYPES["bfloat16"] if isinstance(value, str) and value == "bfloat16" else np.dtype(value)
    except Exception:  # NumPy asks foreign objects for their dtype
        raise TypeError(f"{op.name}: {what} is {shown(value)}, expected one of {', '.join(FLOATS)}") from None
    if dtype.name not in FLOATS or not dtype.isnative:
        raise TypeError(f"{op.name}: {what} is {dtype}, expected one of {', '.join(FLOATS)}")
    return dtype


def number(what: str, value: Any) -> float:
    """A number as a float; `what` names the function and the argument."""
    try:
        if isinstance(value, NO_NUMBERS):
            raise TypeError
        # PyTorch warns of float() for a parameter.
        found = float(value.detach() if hasattr(value, "detach") else value)
        return found + 0.0  # -0.0 becomes 0.0: as keys of plans they are the same
    except Exception:  # a foreign __float__ may raise anything
        raise TypeError(f"{what} is {shown(value)}, expected a number") from None


def _number(name: str) -> Callable[[Operator, Any, Shapes, Attributes], float]:
    return lambda op, value, shapes, attributes: number(f"{op.name}: {name}", value)


def _scale(name: str, divides: bool = False) -> Callable[[Operator, Any, Shapes, Attributes], float]:
    def check(op: Operator, value: Any, shapes: Shapes, attributes: Attributes) -> float:
        found = number(f"{op.name}: {name}", value)
        if not math.isfinite(found) or (divides and not found):
            expected = "a finite number other than 0" if divides else "a finite number"
            raise ValueError(f"{op.name}: {name} is {found}, expected {expected}")
        return found

    return check


def _accumulation(op: Operator, value: Any, shapes: Shapes, attributes: Attributes) -> str:
    return _one_of(op, "accumulation", value, ACCUMULATIONS)


def _shape(op: Operator, value: Any, shapes: Shapes, attributes: Attributes) -> Shape:
    shape = integers(op, "shape", value)
    if any(size < 0 for size in shape):
        raise ValueError(f"{op.name}: shape is {shape}, expected sizes of at least 0")
    if math.prod(size for size in shape if size) >= MOST_ELEMENTS:
        raise ValueError(f"{op.name}: shape is {shape}, expected fewer than {MOST_ELEMENTS} elements")
    return shape


def _checking(check: Callable[[Operator, str, Any], Any]) -> Callable[[str], Callable[..., Any]]:
    """What makes the check of an attribute, by its name."""
    return lambda name: lambda op, value, *rest: check(op, name, value)


def _unless_none(of: Callable[[str], Callable[..., Any]]) -> Callable[[str], Callable[..., Any]]:
    def named(name: str) -> Callable[..., Any]:
        check = of(name)
        return lambda op, value, *rest: None if value is None else check(op, value, *rest)

    return named


_BY_TYPE: dict[Any, Callable[[str], Callable[..., Any]]] = {
    bool: _checking(flag),
    int: _checking(integer),
    float: _number,
    tuple[int, ...]: _checking(integers),
    int | None: _unless_none(_checking(integer)),
    float | None: _unless_none(_number),
    tuple[int, ...] | None: _unless_none(_checking(integers)),
}
_ATTRIBUTES: dict[str, Callable[[Operator, Any, Shapes, Attributes], Any]] = {
    "shape": _shape,
    "axis": _axis,
    "reduction": _reduction,
    "ignore_index": _ignore_index,
    "out_dtype": _out_dtype,
    "alpha": _number("alpha"),
    "logit_scale": _scale("logit_scale"),
    "result_scale": _scale("result_scale"),
    "out_scale": _scale("out_scale", divides=True),
    "accumulation": _accumulation,
    **{
        name: _checking(flag)(name)
        for name in ("scale_down", "overwrite", "check", "inf_as_zero", "stats", "save", "post_op_grads")
    },
}
