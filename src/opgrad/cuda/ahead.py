"""Kernels compiled ahead: what native code needs to launch a `Launch` that Triton's own dispatch launches elsewhere.

A kernel is compiled once for all launches that differ in numbers and in the grid alone. So its machine code can be kept
on disk, and one who finds it there needs no Triton.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from struct import pack, unpack
from typing import Any

from opgrad.contract.signature import Operand
from opgrad.cuda import triton_private
from opgrad.cuda.execute import Launch, Scratch, addressed

BASE = 1 << 12  # an address that stands for aligned memory; it is never used
WARP_SIZE = triton_private.WARP_SIZE
WORD = (1 << 64) - 1
# Parameters behind a kernel's own: Triton's working memory, of which these kernels need none.
OWN = ((0, None), (0, None))
Parameter = tuple[int, Operand | Scratch | None]  # a word, and the array whose address is added to it


@dataclass(frozen=True)
class Machine:
    """A kernel's machine code for an architecture.

    name: of its function. shared: bytes of shared memory of a program. threads: of a thread block. parameters: the
    arguments that are no constants, each by its number, in a tuple by another one, and with its type.
    """

    name: str
    shared: int
    threads: int
    parameters: list[list[Any]]
    code: bytes = b""

    def to_bytes(self) -> bytes:
        """All of it, as `from_bytes` reads it."""
        head = asdict(self) | {"code": ""}
        return json.dumps(head).encode() + b"\n" + self.code


def from_bytes(data: bytes) -> Machine:
    """The kernel that `to_bytes` has written."""
    head, _, code = data.partition(b"\n")
    return Machine(**json.loads(head) | {"code": code})


def key(launch: Launch) -> str:
    """All that a launch's machine code depends on besides the sources, the architecture, and Triton."""
    given = (_described(launch.arguments[each.name], each.is_constexpr) for each in launch.kernel.params)
    described = f"{launch.kernel!r} {' '.join(given)} {sorted(launch.options.items())}"
    return sha256(described.encode()).hexdigest()


def _described(value: Any, is_constant: bool = False) -> str:
    """What of an argument matters to the compiler: constants; of numbers 1, whether 16 divides them, and their size."""
    if isinstance(value, Operand | Scratch):
        return f"*{value.dtype}"
    if isinstance(value, tuple) and not is_constant:
        return f"({','.join(map(_described, value))})"
    if type(value) is int and value != 1 and not is_constant:
        bits = 32 if -(1 << 31) <= value < 1 << 31 else 64 if value < 1 << 63 else "u64"
        return f"i{bits}{'' if value % 16 else ' of 16'}"
    return "float" if type(value) is float and not is_constant else repr(value)


def built(launch: Launch, architecture: int, aligned: bool = True) -> Any:
    """The kernel of a launch as Triton compiles it for an architecture (90: sm_90), which need not be here.

    aligned: all arrays begin at multiples of 16 bytes, as new ones do; otherwise only scratch memory.
    """

    def address(array: Operand | Scratch) -> int:
        return BASE if aligned or isinstance(array, Scratch) else BASE + 8

    values = [addressed(launch.arguments[name], address) for name in launch.kernel.arg_names]
    return triton_private.compiled_for(architecture, launch.kernel, values, launch.options)


def machine(launch: Launch, architecture: int) -> Machine:
    """The machine code of a launch's kernel for aligned arrays."""
    kernel = built(launch, architecture)
    about = kernel.metadata
    parameters = list(_parameters(kernel.src.signature.values()))
    return Machine(about.name, about.shared, WARP_SIZE * about.num_warps, parameters, kernel.asm["cubin"])


def _parameters(dtypes: Any, path: tuple[int, ...] = ()) -> Iterator[list[Any]]:
    for index, dtype in enumerate(dtypes):
        if isinstance(dtype, tuple):
            yield from _parameters(dtype, (*path, index))
        elif dtype != "constexpr":
            yield [[*path, index], dtype]


def parameters(launch: Launch, found: Machine) -> Iterator[Parameter]:
    """The words of a launch's parameters, in their order."""
    values = tuple(launch.arguments[name] for name in launch.kernel.arg_names)
    for path, dtype in found.parameters:
        value: Any = values
        for index in path:
            value = value[index]
        if isinstance(value, Operand | Scratch):
            yield (value.offset if isinstance(value, Scratch) else 0), value
        else:
            yield bits(dtype, value) & WORD, None
    yield from OWN


def bits(dtype: str, value: Any) -> int:
    """A number as a parameter of this dtype holds it."""
    return _NUMBERS.get(dtype, int)(value)


def _bits(code: str) -> Callable[[float], int]:
    return lambda value: int(unpack("<Q", pack(f"<{code}", value).ljust(8, b"\0"))[0])


_NUMBERS: dict[str, Callable[[Any], int]] = {"fp32": _bits("f"), "fp64": _bits("d")}
