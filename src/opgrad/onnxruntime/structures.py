"""Native functions that describe an operator to onnxruntime, from words that follow the operator's structure.

onnxruntime calls them some seven thousand times for each session; in Python that took 3 ms of 7.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

from opgrad.cpu.compiler.decorators import Native, native
from opgrad.cpu.compiler.words import load_word
from opgrad.onnxruntime import abi
from opgrad.onnxruntime.abi import CustomOp
from opgrad.onnxruntime.overloads import VALUE, Overload, Port

LAST_VERSION = 2**31 - 1
# The words behind a structure: addresses of texts; how many inputs and outputs, and where the words of these are.
FIRST, COUNT = ctypes.sizeof(CustomOp) // 8, 6
NAME, PROVIDER, INPUTS, OUTPUTS, INPUT_WORDS, OUTPUT_WORDS = range(FIRST, FIRST + COUNT)
TYPE, CHARACTERISTIC, MEMORY, PORT_WORDS = range(4)


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
    words = [word for each in ports for word in (abi.ELEMENT_TYPES[each.dtype], _characteristic(each), _memory(each))]
    return (ctypes.c_int64 * len(words))(*words)


def _characteristic(port: Port) -> int:
    if port.several:
        return abi.VARIADIC
    # onnxruntime refuses required outputs of undefined type, except with one input of undefined type.
    return abi.OPTIONAL if port.optional or port.dtype == abi.ANY else abi.REQUIRED


def _memory(port: Port) -> int:
    return abi.CPU_MEMORY if port.operand == VALUE else abi.DEFAULT_MEMORY


# --- answers --------------------------------------------------------------------------------------------------------


@native(1)
def name(op: int) -> int:
    return load_word(op, NAME)


@native(1)
def provider(op: int) -> int:
    return load_word(op, PROVIDER)


@native(1)
def inputs(op: int) -> int:
    return load_word(op, INPUTS)


@native(1)
def outputs(op: int) -> int:
    return load_word(op, OUTPUTS)


@native(2)
def input_type(op: int, i: int) -> int:
    return load_word(load_word(op, INPUT_WORDS), PORT_WORDS * i + TYPE)


@native(2)
def input_characteristic(op: int, i: int) -> int:
    return load_word(load_word(op, INPUT_WORDS), PORT_WORDS * i + CHARACTERISTIC)


@native(2)
def input_memory(op: int, i: int) -> int:
    return load_word(load_word(op, INPUT_WORDS), PORT_WORDS * i + MEMORY)


@native(2)
def output_type(op: int, i: int) -> int:
    return load_word(load_word(op, OUTPUT_WORDS), PORT_WORDS * i + TYPE)


@native(2)
def output_characteristic(op: int, i: int) -> int:
    return load_word(load_word(op, OUTPUT_WORDS), PORT_WORDS * i + CHARACTERISTIC)


@native(1)
def one(op: int) -> int:
    return 1


@native(1)
def last_version(op: int) -> int:
    return LAST_VERSION


MEMBERS: dict[str, Native] = {
    "GetName": name,
    "GetExecutionProviderType": provider,
    "GetInputTypeCount": inputs,
    "GetOutputTypeCount": outputs,
    "GetInputType": input_type,
    "GetOutputType": output_type,
    "GetInputCharacteristic": input_characteristic,
    "GetOutputCharacteristic": output_characteristic,
    "GetInputMemoryType": input_memory,
    "GetVariadicInputMinArity": one,
    "GetVariadicInputHomogeneity": one,
    "GetVariadicOutputMinArity": one,
    "GetVariadicOutputHomogeneity": one,
    "GetStartVersion": one,
    "GetEndVersion": last_version,
}
