"""The overloads of the declared operators, and the structures that describe them to onnxruntime.

An overload is an ONNX name with a choice of dtypes. Native functions answer onnxruntime from words that follow an
operator's structure: it calls them some seven thousand times for each session; in Python that took 3 ms of 7.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opgrad.contract import FLOATS, INTEGERS, OnnxName, Operator
from opgrad.cpu.compiler.decorators import Native, native
from opgrad.cpu.compiler.words import load_word
from opgrad.onnxruntime import abi
from opgrad.onnxruntime.abi import ANY, CustomOp
from opgrad.onnxruntime.compute import COPIES, FLAG
from opgrad.ops import public_operators

# Inputs that are read as attributes, and their dtypes, unless the operator declares others.
VALUE_DTYPES: dict[str, tuple[str, ...]] = {
    "shape": ("int64",),
    "ignore_index": ("int64",),
    "overwrite": ("bool",),
    **dict.fromkeys(("starts", "ends", "axes", "steps"), INTEGERS),
}
# ONNX operators have one type for all float inputs, except these.
OWN_DTYPE = ("value", "factor")
OUTPUT_TYPES = ("output_type", "to")  # attributes that set the results' type
# onnxruntime's own loss has a kernel for the CPU alone. A session knows one definition of an operator, so where ours is
# on a device, it is on the CPU, too.
LOSS = OnnxName(
    "SoftmaxCrossEntropyLoss",
    ("logits", "labels", "weight?"),
    ("loss", "log_prob?"),
    {"reduction": "mean", "ignore_index": -1},
    origin="",
)
VALUE = -1  # the place of an input that is read as an attribute


@dataclass(frozen=True)
class Port:
    """An input or output of an ONNX operator.

    `operand` is its place among the operands of a plan, or VALUE. `dtype` is ANY for an output whose type is
    an attribute of the node. `several`: it stands for any number of them, the first of which has that place.
    """

    parameter: str
    optional: bool
    dtype: str
    operand: int
    several: bool = False


@dataclass(frozen=True)
class Overload:
    """An ONNX operator for one choice of input dtypes, on the CPU or on a CUDA device."""

    operator: Operator
    onnx: OnnxName
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    on_device: bool = False


def overloads() -> Iterator[Overload]:
    """Every overload on the CPU of every declared operator that has an ONNX name."""
    for operator in public_operators().values():
        for onnx in operator.onnx:
            yield from _overloads(operator, onnx)


def overloads_beside_cuda() -> Iterator[Overload]:
    """Those that sessions with CUDA's provider have besides: of every operator with a CUDA kernel, and the loss."""
    for operator in public_operators().values():
        if "cuda" in operator.support.backends:
            loss = (LOSS,) if operator.name == "softmax_cross_entropy_loss" else ()
            for onnx in (*operator.onnx, *loss):
                yield from (replace(each, on_device=True) for each in _overloads(operator, onnx))
            for onnx in loss:
                yield from _overloads(operator, onnx)


def _overloads(operator: Operator, onnx: OnnxName) -> Iterator[Overload]:
    for dtypes in _choices(operator, onnx):
        inputs = tuple(_input(operator, name, dtypes) for name in onnx.inputs)
        outputs = tuple(_output(operator, onnx, name, dtypes) for name in onnx.outputs)
        yield Overload(operator, onnx, inputs, outputs)


def _choices(operator: Operator, onnx: OnnxName) -> Iterator[dict[str, str]]:
    """Every choice of dtypes for the inputs: those of one group have the same."""
    groups: dict[str, list[str]] = {}
    for name in map(plain, onnx.inputs):
        groups.setdefault(_group(operator, onnx, name), []).append(name)
    options = []
    for names in groups.values():
        first, *others = (_dtypes(operator, onnx, name) for name in names)
        options.append([dtype for dtype in first if all(dtype in dtypes for dtypes in others)])
    for chosen in itertools.product(*options):
        yield {name: dtype for names, dtype in zip(groups.values(), chosen, strict=True) for name in names}


def _group(operator: Operator, onnx: OnnxName, name: str) -> str:
    """What inputs of one dtype share: the letter that the declaration gives them, or that they are arrays of floats."""
    letter = onnx.types.get(name)
    if isinstance(letter, str):
        return letter
    dtypes = operator.inputs[name].dtypes if name in operator.inputs else ()
    shared = letter is None and len(dtypes) > 1 and set(dtypes) <= set(FLOATS) and name not in OWN_DTYPE
    return "" if shared else name


def _dtypes(operator: Operator, onnx: OnnxName, name: str) -> tuple[str, ...]:
    given = onnx.types.get(name)
    if name in operator.inputs:
        return given if isinstance(given, tuple) else operator.inputs[name].dtypes
    return VALUE_DTYPES.get(name, FLOATS) if given is None or isinstance(given, str) else given


def plain(name: str) -> str:
    """The parameter that an ONNX input or output stands for."""
    return name.rstrip("?*")


def _input(operator: Operator, name: str, dtypes: dict[str, str]) -> Port:
    parameter, optional, several = plain(name), "?" in name, "*" in name
    operand = VALUE if parameter in operator.attributes else operator.arrays.index(parameter)
    return Port(parameter, optional, dtypes[parameter], operand, several)


def _output(operator: Operator, onnx: OnnxName, name: str, dtypes: dict[str, str]) -> Port:
    parameter, optional, several = plain(name), "?" in name, "*" in name
    if parameter not in operator.results:
        return Port(parameter, optional, "bool", FLAG)
    dtype, allowed = dtypes.get(model_of(operator, parameter), ""), operator.results[parameter].dtypes
    dtype = dtype if dtype in allowed else allowed[0]
    if not onnx.attributes.keys().isdisjoint(OUTPUT_TYPES):
        dtype = ANY
    if parameter in onnx.overwrites:
        return Port(parameter, optional, dtype, COPIES[list(onnx.overwrites).index(parameter)])
    operand = len(operator.arrays) + list(operator.results).index(parameter)
    return Port(parameter, optional, dtype, operand, several)


def model_of(operator: Operator, result: str) -> str:
    """The input whose dtype a result has when nothing else is asked for."""
    return (operator.results[result].dtype_of or next(iter(operator.arrays), "")).removesuffix("[]")


LAST_VERSION = 2**31 - 1
# The words behind a structure: addresses of texts; how many inputs and outputs, and where the words of these are.
FIRST, COUNT = ctypes.sizeof(CustomOp) // 8, 6
NAME, PROVIDER, INPUTS, OUTPUTS, INPUT_WORDS, OUTPUT_WORDS = range(FIRST, FIRST + COUNT)
TYPE, ROLE, MEMORY, PORT_WORDS = range(4)


class Described(ctypes.Structure):
    """An operator's structure, with the words that `MEMBERS` read."""

    _fields_ = [("operator", CustomOp), ("words", ctypes.c_int64 * COUNT)]


def described(members: dict[str, int], overload: Overload, name: int, provider: int) -> tuple[Described, Any]:
    """The structure of an overload, and the objects that must live as long; name, provider: addresses of texts."""
    inputs, outputs = _words(overload.inputs), _words(overload.outputs)
    counts = len(overload.inputs), len(overload.outputs)
    words = name, provider, *counts, ctypes.addressof(inputs), ctypes.addressof(outputs)
    return Described(CustomOp(version=abi.VERSION, **members), words), (inputs, outputs)


def _words(ports: Sequence[Port]) -> Any:
    words = []
    for port in ports:
        # onnxruntime refuses required outputs of undefined type, except with one input of undefined type.
        characteristic = abi.OPTIONAL if port.optional or port.dtype == ANY else abi.REQUIRED
        memory = abi.CPU_MEMORY if port.operand == VALUE else abi.DEFAULT_MEMORY
        words += [abi.ELEMENT_TYPES[port.dtype], abi.VARIADIC if port.several else characteristic, memory]
    return (ctypes.c_int64 * len(words))(*words)


# --- answers --------------------------------------------------------------------------------------------------------


def _answer(name: str, count: int, answer: Callable[..., int]) -> Native:
    """A native function of `count` parameters. name: of its variable, where other processes find it to compile it."""
    answer.__qualname__ = name
    return native(count)(answer)


own_name = _answer("own_name", 1, lambda op: load_word(op, NAME))
provider = _answer("provider", 1, lambda op: load_word(op, PROVIDER))
inputs = _answer("inputs", 1, lambda op: load_word(op, INPUTS))
outputs = _answer("outputs", 1, lambda op: load_word(op, OUTPUTS))
input_type = _answer("input_type", 2, lambda op, i: load_word(load_word(op, INPUT_WORDS), PORT_WORDS * i + TYPE))
output_type = _answer("output_type", 2, lambda op, i: load_word(load_word(op, OUTPUT_WORDS), PORT_WORDS * i + TYPE))
input_role = _answer("input_role", 2, lambda op, i: load_word(load_word(op, INPUT_WORDS), PORT_WORDS * i + ROLE))
output_role = _answer("output_role", 2, lambda op, i: load_word(load_word(op, OUTPUT_WORDS), PORT_WORDS * i + ROLE))
input_memory = _answer("input_memory", 2, lambda op, i: load_word(load_word(op, INPUT_WORDS), PORT_WORDS * i + MEMORY))
one = _answer("one", 1, lambda op: 1)
last_version = _answer("last_version", 1, lambda op: LAST_VERSION)
MEMBERS: dict[str, Native] = {
    "GetName": own_name,
    "GetExecutionProviderType": provider,
    "GetInputTypeCount": inputs,
    "GetOutputTypeCount": outputs,
    "GetInputType": input_type,
    "GetOutputType": output_type,
    "GetInputCharacteristic": input_role,
    "GetOutputCharacteristic": output_role,
    "GetInputMemoryType": input_memory,
    "GetVariadicInputMinArity": one,
    "GetVariadicInputHomogeneity": one,
    "GetVariadicOutputMinArity": one,
    "GetVariadicOutputHomogeneity": one,
    "GetStartVersion": one,
    "GetEndVersion": last_version,
}
