"""What the declaration of an operator holds.

An operator is declared once, as a NumPy function in `opgrad.ops`: its signature is the interface, its body
the float64 reference, its docstring the documentation. The annotations say which dtypes and shapes each
array may have, and what an attribute must be; the decorator adds what Python cannot say.
"""

import functools
import importlib
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar

import numpy as np

from opgrad.base.locks import once
from opgrad.contract.attributes import DTYPES, FLOATS, Array, Check, Shape, Spec, check_of, shown

NUMBERS = (bool, int, float)  # types of numbers that may be passed in place of an array


class Arrays(Protocol):
    """The functions of the library to which a call's arrays belong, which make the arrays of an expanded call."""

    def __hash__(self) -> int: ...

    def owns(self, value: Any) -> bool:
        """Whether a value is one of the library's arrays."""

    def spec(self, array: Any) -> Spec:
        """The shape and the dtype of an array, or of what NumPy takes for one."""

    def broadcast(self, array: Any, shape: Shape, like: Any) -> Any:
        """A view of an array, or a number as an array beside `like`, in this shape; what is neither as it is.

        Raises ValueError if the array has another shape."""

    def state(self, words: Array, like: Any) -> Any:
        """Seed and offset, int64 numbers of NumPy's, on the device of `like`, for which the call does not wait."""

    def total(self, array: Any, axes: tuple[int, ...], shape: Shape, dtype: str) -> Any:
        """The sum over these axes (none: the array), in float64, rounded to this dtype and in this shape."""


class Memory(Protocol):
    """How a library's arrays lie in memory, and how it makes new ones: what `Runner` needs."""

    def spec(self, array: Any) -> Spec:
        """Shape, dtype and strides in bytes. Raises TypeError for a dtype that NumPy and ml_dtypes lack."""

    def address(self, array: Any) -> int:
        """Where the first element lies."""

    def strides(self, spec: Spec, order: tuple[int, ...], model: Any) -> tuple[int, ...]:
        """The strides in bytes that a new array is given. `order` is the memory order of the axes that suits the
        kernels; `model` is the first array of the call if the new one has an entry for each of its elements."""

    def maker(self, spec: Spec, like: Any) -> Callable[[], Any]:
        """What makes new arrays of this shape, dtype and strides beside `like`."""

    def packed(self, array: Any, order: tuple[int, ...]) -> Any:
        """A copy whose axes lie in memory in this order."""

    def assign(self, destination: Any, source: Any) -> None:
        """Copy the elements of one array into another of the same shape."""


WAYS = "__array__", "__array_interface__", "__array_struct__"  # by which NumPy makes arrays of objects


def array_of(value: Any) -> Array:
    """NumPy's array of a value; of one that has DLPack alone, in the memory that it lends. Raises what they raise."""
    return np.from_dlpack(value) if type(value) is not np.ndarray and _only_lends(value) else np.asarray(value)


def _only_lends(value: Any) -> bool:
    return hasattr(value, "__dlpack__") and not any(hasattr(value, way) for way in WAYS)


def no_array(what: str, value: Any, error: Exception) -> TypeError:
    """The exception for a value of which `array_of` has made no array."""
    reason = f"which NumPy cannot take by DLPack: {error}" if _only_lends(value) else "expected an array"
    return TypeError(f"{what} is {type(value).__name__}, {reason}")


class Host:
    """`Arrays` for NumPy's."""

    @staticmethod
    def owns(value: Any) -> bool:
        return isinstance(value, np.ndarray)

    @staticmethod
    def spec(array: Any) -> Spec:
        found = array_of(array)
        return Spec(found.shape, found.dtype)

    @staticmethod
    def broadcast(array: Any, shape: Shape, like: Any) -> Array:
        found = array_of(float(array) if isinstance(array, int) and not isinstance(array, bool) else array)
        return found if found.shape == shape else np.broadcast_to(found, shape)

    @staticmethod
    def state(words: Array, like: Any) -> Array:
        return words

    @staticmethod
    def total(array: Array, axes: tuple[int, ...], shape: Shape, dtype: str) -> Array:
        summed = array.sum(axes, dtype=np.float64).reshape(shape) if axes else array
        with np.errstate(all="ignore"):  # what is too large becomes infinite, as in kernels
            return np.asarray(summed, DTYPES[dtype])  # a sum over all axes is no array


HOST = Host()


def is_masked(value: Any) -> bool:
    """Whether a value is a masked array. The question does not import np.ma: without it there is no such array."""
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return kind is not None and isinstance(value, kind)


# What an operator's loops run over: single elements; rows along `axis`; rows of the classes, which are axis 1; slices
# that indices name; blocks of rows of arrays with any strides, with attributes. The kernels of "whole" and of "strided"
# operators choose their loops themselves. The arrays of a "whole" operator are contiguous. Those of a "strided" one may
# have any strides, but for the last axis, whose neighbours lie side by side.
Kind = Literal["elements", "rows", "classes", "slices", "blocks", "whole", "strided"]


@dataclass(frozen=True)
class Support:
    """Where an operator runs: the backends that have its kernel, and the front ends that take its calls."""

    backends: tuple[str, ...]
    front_ends: tuple[str, ...]


EVERYWHERE = Support(("cpu", "cuda"), ("numpy", "torch", "cupy", "jax", "onnxruntime"))
# Operators that only training graphs contain. PyTorch and JAX differentiate the forward operators themselves.
IN_GRAPHS = Support(("cpu",), ("numpy", "onnxruntime"))
# Operators that PyTorch's and JAX's arrays have on the CPU alone; PyTorch has its own for CUDA.
ON_CPU = Support(("cpu",), ("numpy", "torch", "jax", "onnxruntime"))
# Operators of which the functions of losses are made. Users call the functions.
IN_LOSSES = Support(("cpu", "cuda"), ("numpy", "torch"))
# Operators on one process's part of arrays that are split over several. opgrad.torch combines the parts' results.
ON_SHARDS = Support(("cpu", "cuda"), ("numpy",))


@dataclass(frozen=True)
class Tensor:
    """What an array argument or a result may be.

    dtypes: the names of those that it may have. shape: computes its shape from the shapes of the arrays before it and
    from the attributes; None: any shape is allowed. as_in: says in messages where the shape comes from.
    dtype_of: the argument whose dtype it must have, unless it has one of those in `besides`. If a result may not have
    that dtype, it has the first of `dtypes`; the attribute `out_dtype` overrides both. ranks: how many dimensions it
    may have.
    role: "element" if it has an entry for each element of the first array, "sample" if it has one for each sample,
    which is the first array's shape without axis 1, and "alone" if its shape has nothing to do with the loops, which
    `operator` says of all arrays of "whole" and "strided" operators.
    several: it stands for a list of any number of arrays (see `several`).
    """

    dtypes: tuple[str, ...]
    shape: Callable[..., Shape] | None = None
    as_in: str = ""
    dtype_of: str | None = None
    ranks: range = range(65)
    role: Literal["element", "sample", "alone"] = "element"
    several: bool = False
    besides: tuple[str, ...] = ()


def shaped_like(name: str, dtypes: tuple[str, ...] = FLOATS, **rest: Any) -> Tensor:
    """An array of the shape of another one of this name; rest: further fields."""
    return Tensor(dtypes, lambda shapes, attributes: shapes[name], f"the shape of {name}", **rest)


def like(name: str, dtypes: tuple[str, ...] = FLOATS, **rest: Any) -> Tensor:
    """An array of the shape and the dtype of another one of this name; rest: further fields."""
    return shaped_like(name, dtypes, dtype_of=name, **rest)


def one_number(name: str, dtypes: tuple[str, ...], **rest: Any) -> Tensor:
    """An argument of this name that is one number, of any rank up to 1; rest: further fields."""
    return Tensor(dtypes, lambda shapes, _: (1,) if shapes[name] == (1,) else (), "one number", **rest)


def elements(result: str, source: str) -> dict[str, Any]:
    """What `operator` is told of a result that is computed element by element, and may take its source's memory."""
    return {"kind": "elements", "results": {result: like(source)}, "in_place": {result: (source,)}}


@dataclass(frozen=True)
class OnnxName:
    """An ONNX operator of domain com.microsoft that computes this operator.

    inputs, outputs: the operator's parameters and results in ONNX order; empty: all its arrays and results. A "?"
    behind a name marks an optional one, a "*" behind the last name marks a list of any length. The name of an attribute
    stands for an input whose value must be known, a tensor in CPU memory.
    attributes: the ONNX attributes with the original defaults. until_13: a node's axis k means all axes from k on, as
    in Softmax before opset 13.
    types: a letter or a word for inputs that share a dtype of their own; the dtypes of inputs that are read as
    attributes, and of arrays that may have more dtypes elsewhere. All other inputs of floats share one dtype.
    origin: the domain of the original operator. overwrites: for a result that is written over an input, that input; the
    caller keeps its memory.
    shape_of: the result whose declared shape is the attribute `shape`, if the node lacks the optional input `shape`.
    unread: attributes that front ends cannot read, so that a node must not have them.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    until_13: bool = False
    types: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    origin: str = "com.microsoft"
    overwrites: Mapping[str, str] = field(default_factory=dict)
    shape_of: str | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class General:
    """What calls of an operator may have beyond plain ones, and how such a call is expanded to an operator of its own.

    keywords: the function's parameters that plain calls lack.
    expand: given the operator, a call's arguments by name and the library of its arrays, returns the operator that
    computes the call, and the arguments by that operator's names. For a plain call both are as given.
    over_arrays: calls change(name, array) for each array among the keywords, under the name of the input that it
    becomes, and returns the arguments with the results in place of the arrays; by default there are none.
    by_keywords: whether a call without these keywords, of arrays of one declared dtype, is known as plain by that.
    """

    keywords: tuple[str, ...]
    expand: Callable[["Operator", dict[str, Any], Arrays], tuple["Operator", dict[str, Any]]]
    over_arrays: Callable[[Mapping[str, Any], Callable[[str, Any], Any]], Mapping[str, Any]] = lambda given, _: given
    by_keywords: bool = False


@dataclass(frozen=True, eq=False)
class Operator:
    """One declared operator, or one to which a call is expanded."""

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
    checks: Mapping[str, Check] = field(default_factory=dict)  # of attributes, and of the keywords of `general`
    support: Support = EVERYWHERE
    general: General | None = None
    finish: Callable[[tuple[Any, ...]], Any] | None = None  # turns the tuple of results into what the function returns
    lists: int = 0  # in how many lists `finish` returns the results, if in lists
    instead: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # functions that calls are handed to

    @once
    def types(self) -> dict[str, Any]:
        """The annotations of the attributes, without what `Annotated` adds."""
        hints = typing.get_type_hints(self.reference)
        return {name: hints[name] for name in self.attributes if name in hints}

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the array arguments, in order."""
        return tuple(self.inputs)

    def kernel(self, package: str) -> Callable[..., Any]:
        """The function of the operator's name in the module of its family, in a package that has one for each family.

        Raises NotImplementedError if there is none.
        """
        module = f"{package}.{self.family}"
        try:
            found = getattr(importlib.import_module(module), self.name, None)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            found = None
        if found is None:
            place = module.replace(".", "/")
            raise NotImplementedError(f"{self.name}: no kernel here; it would stand in {place}.py")
        return typing.cast(Callable[..., Any], found)


_declared: dict[str, Operator] = {}


def reference(name: str) -> Callable[..., Any]:
    """The float64 reference of a declared operator."""
    return _declared[name].reference


def declared() -> Mapping[str, Operator]:
    """All operators that have been declared, by name; `opgrad.ops` declares them."""
    return _declared


F = TypeVar("F", bound=Callable[..., Any])


def operator(
    formula: str = "", *, results: Mapping[str, Tensor], kind: Kind = "whole", support: Support = EVERYWHERE,
    forward: str | None = None, onnx: OnnxName | tuple[OnnxName, ...] = (),
    in_place: Mapping[str, tuple[str, ...]] | None = None, general: General | None = None,
    instead: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[[F], F]:  # fmt: skip
    """Declare an operator: the function is its reference. `opgrad.call.arrays` makes the function that people call.

    formula: what it computes, for lists; by default the formula of the docstring.
    onnx: the ONNX operator that computes the same, or several of them.
    in_place: for a result, the arguments whose memory it may take over. instead: for a keyword, the function that
    answers a call in which the keyword is true; it is given the operator's name, its public function and the other
    arguments.
    """

    def declare(function: F) -> F:
        found = _interface(function, (*(general.keywords if general else ()), *(instead or ())))
        found["results"] = dict(results)
        if kind in ("whole", "strided"):
            for tensors in (found["inputs"], found["results"]):
                tensors |= {name: replace(tensor, role="alone") for name, tensor in tensors.items()}
        inputs = tuple(f"{name}{'?' * (name in found['optional'])}" for name in found["inputs"])
        nodes, outputs = onnx if isinstance(onnx, tuple) else (onnx,), tuple(results)
        op = Operator(
            formula=formula or _formula(function),
            kind=kind,
            support=support,
            forward=forward,
            onnx=tuple(replace(node, inputs=node.inputs or inputs, outputs=node.outputs or outputs) for node in nodes),
            in_place=in_place or {},
            general=general,
            instead=instead or {},
            **found,
        )
        if function.__doc__:  # Python may have left docstrings out
            function.__doc__ = _documented(op)
        _declared[op.name] = op
        return function

    return declare


def _documented(op: Operator) -> str:
    """The docstring of an operator's function, with what the declaration says where the docstring itself does not.

    That is `check`, `needs` and `out` before the sentence on the results, that sentence for a result like an argument,
    and the errors at its end.
    """
    text, formula, rest = inspect.cleandoc(op.reference.__doc__ or "").partition("\n\nFormula: ")
    found = re.search(r"\s+^Returns ", text, re.MULTILINE)
    arguments, returned = (text[: found.start()], text[found.start() :]) if found else (text, "")
    for name, statement in _statements(op).items():
        if not re.search(rf"(^|[ ,]){name}[:,] ", arguments, re.MULTILINE):
            arguments += "\n" + "\n    ".join(textwrap.wrap(f"{name}: {statement}", 116))
    if not returned:
        ((name, result),) = op.results.items()
        returned = f"\nReturns {name}, {result.as_in.replace('the shape', 'of the shape and dtype')}."
    if "Raises " not in returned:
        number = next((number for name, number in NUMBERS_IN.items() if name in op.inputs), None)
        also = f", also for {number} out of range, naming the first one, before anything is written"
        returned += f"\nRaises TypeError, ValueError{also if number and op.support != ON_SHARDS else ''}."
    return arguments + returned + formula + rest


# What each of an input's numbers is, for inputs that are checked number by number.
NUMBERS_IN = {"labels": "a label", "indices": "an index", "position_ids": "a position", "g_idx": "a block in g_idx"}


def _statements(op: Operator) -> dict[str, str]:
    """What the declaration says of arguments that many operators have, by the argument's name."""
    results, said = list(op.results), {}
    if "check" in op.attributes:
        number = "labels" if "labels" in op.inputs else "indices"
        instead = "leaving them out" if op.forward and number == "indices" else "giving NaN"
        waits = f"on CUDA, wait for the device and raise for {number} out of range instead of {instead}"
        said["check"] = f"{waits}; the CPU always checks."
    if op.general and NEEDS in op.general.keywords:
        some = f"such as ({', '.join(map(repr, results[:2]))})".replace("'", '"')
        said[NEEDS] = f"the names of the results that are wanted, {some}; the others are not computed. None: all."
    where = "where to write"
    if NEEDS in said:
        where += "; a tuple if there are several results"
    elif len(results) > 1:
        where += f" {', '.join(results[:-1])} and {results[-1]}, a tuple"
    shared = ", ".join(f"{result} may be {' or '.join(names)}" for result, names in op.in_place.items())
    said["out"] = f"{where}; {shared or 'must not overlap an input'}."
    return said


def _formula(function: Callable[..., Any]) -> str:
    """The formula in a function's docstring; nothing if Python has left docstrings out."""
    found = re.search(r"Formula: (.*?)\.?\s*(?:Source: .*?)?\n\n", function.__doc__ or "", re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def _interface(function: Callable[..., Any], general: tuple[str, ...]) -> dict[str, Any]:
    """The fields of an `Operator` that follow from its function. general: the keywords that plain calls lack."""
    hints, signature = function.__annotations__, inspect.signature(function)
    plain = [p for name, p in signature.parameters.items() if name not in general]
    inputs = {p.name: found for p in plain if (found := _tensor(hints[p.name])) is not None}
    rest = [p for p in plain if p.name not in inputs and p.name != "out"]
    checked = {name: check_of(hints[name]) for name in (*(p.name for p in rest), *general) if name in hints}
    return {
        "name": function.__name__,
        "family": function.__module__.rpartition(".")[2],
        "reference": function,
        "inputs": inputs,
        "optional": frozenset(name for name in inputs if signature.parameters[name].default is None),
        "attributes": {p.name: p.default for p in rest},
        "checks": {name: check for name, check in checked.items() if check is not None},
        "parameters": tuple(p.name for p in plain),
    }


def _tensor(hint: Any) -> Tensor | None:
    """The Tensor inside an annotation such as `Floats` or `Floats | None`."""
    for option in (hint, *typing.get_args(hint)):
        if typing.get_origin(option) is Annotated:
            for extra in option.__metadata__:
                if isinstance(extra, Tensor):
                    return extra
    return None


NEEDS = "needs"  # the keyword of operators that can leave results out


@functools.lru_cache(maxsize=256)  # building it takes longer than a small call
def spread(op: Operator, given: int, made: int) -> Operator:
    """The operator with `given` single inputs in place of each list that it takes, and `made` results for each list.

    They are named NAME[0], NAME[1], …. The shape of such a result is computed with the keyword `index`.
    """

    def replaced(tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if not tensor.several:
                found[name] = tensor
                continue
            for i in range(count):
                shape = tensor.shape and functools.partial(tensor.shape, index=i)
                model = tensor.dtype_of and tensor.dtype_of.replace("[]", f"[{i}]")
                found[f"{name}[{i}]"] = replace(tensor, shape=shape, dtype_of=model, several=False)
        return found

    inputs, results = replaced(op.inputs, given), replaced(op.results, made)
    shared = {
        f"{result}[{i}]": tuple(f"{name}[{i}]" for name in names)
        for result, names in op.in_place.items()
        for i in range(made)
    }
    rest, lists = [name for name in op.parameters if name not in op.inputs], len(op.results) if made else 0
    found = replace(op, inputs=inputs, results=results, parameters=(*inputs, *rest), in_place=shared, general=None)
    return replace(found, lists=lists, finish=functools.partial(_in_lists, lists)) if lists else found


def several(made: Callable[[Operator, Mapping[str, Any], int], int] = lambda op, given, count: 0) -> General:
    """How calls are expanded of an operator that takes lists of arrays, all of the same length.

    made: returns the length of the lists that the operator returns, 0 if it returns none. It is given the operator, the
    arguments, which are not checked yet, and the length of the lists that it takes, 1 if it takes none.
    """

    def expand(op: Operator, given: dict[str, Any], library: Arrays) -> tuple[Operator, dict[str, Any]]:
        flat, count = dict(given), 1
        lists = [name for name, tensor in op.inputs.items() if tensor.several]
        for name in lists:
            arrays = flat.pop(name)
            if not isinstance(arrays, list | tuple):
                raise TypeError(f"{op.name}: {name} is {type(arrays).__name__}, expected a list of arrays")
            if not arrays:
                raise ValueError(f"{op.name}: {name} is empty, expected at least one array")
            if name != lists[0] and len(arrays) != count:
                has = f"{name} has {len(arrays)} arrays"
                raise ValueError(f"{op.name}: {has}, expected {count}, as many as {lists[0]}")
            count = len(arrays)
            flat |= {f"{name}[{i}]": array for i, array in enumerate(arrays)}
        results = made(op, given, count)
        # Lists become one tuple, and a tuple of one becomes its array.
        if results and isinstance(flat.get("out"), list | tuple):
            out = tuple(array for each in flat["out"] for array in (each if isinstance(each, list | tuple) else [each]))
            flat["out"] = out[0] if len(out) == 1 else out
        return spread(op, count, results), flat

    return General((), expand)


def _in_lists(lists: int, results: tuple[Any, ...]) -> Any:
    """The results as one list, or as a tuple of several lists of the same length."""
    if lists == 1:
        return list(results)
    length = len(results) // lists
    return tuple(list(results[start : start + length]) for start in range(0, len(results), length))


# --- operators whose calls may leave results out -------------------------------------------------------------------


def only(op: Operator, needs: Sequence[str]) -> Operator:
    """The operator with these results alone, in the order of its declaration."""
    return replace(op, results={name: tensor for name, tensor in op.results.items() if name in needs}, general=None)


def choosing(unasked: tuple[str, ...] | None = None) -> General:
    """How calls are expanded of an operator with the keyword `needs`, which names the results that a call wants.

    unasked: those that a call gets whose `needs` is None; None stands for all.
    """

    def expand(op: Operator, given: dict[str, Any], library: Arrays) -> tuple[Operator, dict[str, Any]]:
        needs = given.get(NEEDS)
        if needs is None:
            return (op if unasked is None else only(op, unasked)), given
        known = isinstance(needs, tuple | list) and all(isinstance(each, str) and each in op.results for each in needs)
        if not known or not needs:
            expected = f"some of {', '.join(op.results)} in a tuple"
            raise ValueError(f"{op.name}: {NEEDS} is {shown(needs)}, expected {expected}")
        return only(op, tuple(needs)), given

    return General((NEEDS,), expand)


def chosen(results: Mapping[str, Any], needs: tuple[str, ...] | None) -> Any:
    """What a reference with the keyword `needs` returns: these results, None for all; one of them by itself."""
    found = tuple(results[name] for name in results if needs is None or name in needs)
    return found if len(found) > 1 else found[0]
