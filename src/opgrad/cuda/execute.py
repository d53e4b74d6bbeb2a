"""CUDA programs: launches of Triton kernels, compiled once for a signature, then run with nothing but addresses.

Triton's own dispatch looks at every argument at every call. A signature has settled all of that, so a program
keeps the compiled kernels and their arguments in order; a call fills in the addresses and launches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from opgrad.contract.signature import Explain, Operand
from opgrad.cuda import ALIGNMENT, triton_private


@dataclass(frozen=True)
class Scratch:
    """Scratch memory from a byte offset on; offsets are multiples of ALIGNMENT."""

    offset: int = 0
    dtype: str = "float32"


class Space:
    """Scratch memory as it is handed out."""

    def __init__(self, size: int = 0) -> None:
        self.size = size

    def take(self, count: int, dtype: str) -> Scratch:
        """Memory for `count` elements."""
        taken = Scratch(self.size, dtype)
        self.size += -(-count * (8 if dtype.endswith("64") else 4) // ALIGNMENT) * ALIGNMENT
        return taken


@dataclass(frozen=True)
class Launch:
    """One kernel with its arguments by parameter name: numbers, operands, tuples of operands, scratch memory, None,
    constants.

    grid: the number of programs along each axis. warps: per program. ctas: thread blocks of a cluster that share
    a program. flush: exp2 and rsqrt take denormals for 0, which saves 3 instructions each; log errs on them.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    warps: int = 4
    ctas: int = 1
    flush: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What the compiler is told.

        Triton would fuse products into the sums behind them: then both factors stay in registers, and a row of
        32,768 no longer fits. Where fusing is wanted, kernels say fma.
        """
        return {
            "num_warps": self.warps,
            "num_ctas": self.ctas,
            "enable_reflect_ftz": self.flush,
            "enable_fp_fusion": False,
        }


@dataclass(frozen=True)
class Program:
    """What a kernel function returns: launches in order, their scratch memory, and the name of its regime.

    checks: launches that leave the place of the first wrong label or index (-1: none) and its value as two int64
    at the beginning of scratch memory; explain: the exception for them.
    """

    launches: Sequence[Launch]
    scratch_bytes: int = 0
    regime: str = ""
    checks: Sequence[Launch] = ()
    explain: Explain | None = None


class Address:
    """An address as Triton takes tensors: an object with `data_ptr` and `dtype`.

    The other methods are what its interpreter calls to bring a tensor to the host, where the memory already is.
    """

    def __init__(self, dtype: str, address: int):
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address

    def _itself(self, *args: Any, **kwargs: Any) -> "Address":
        return self

    def _nothing(self, *args: Any) -> None:
        return None

    untyped_storage = cpu = new_empty = set_ = _itself
    storage_offset = size = stride = copy_ = _nothing


def addressed(value: Any, address: Callable[[Operand | Scratch], int]) -> Any:
    """An argument as Triton takes it: operands and scratch memory with their addresses."""
    if isinstance(value, Operand | Scratch):
        return Address(value.dtype, address(value))
    return tuple(addressed(each, address) for each in value) if _are_operands(value) else value


def _are_operands(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(each, Operand) for each in value)


class Compiled:
    """A program whose kernels are compiled for addresses of certain alignments; `run` may be called by any thread."""

    def __init__(self, program: Program, addresses: Sequence[int], scratch: int):
        self.program = program
        self._launches = [_Launch(launch, addresses, scratch) for launch in program.launches]

    def run(self, addresses: Sequence[int], scratch: int, stream: int | None) -> None:
        """Launch on a stream; addresses by operand number, 0 for those not given."""
        for launch in self._launches:
            launch.run(addresses, scratch, stream)


class _Launch:
    """A launch with its kernel compiled."""

    def __init__(self, launch: Launch, addresses: Sequence[int], scratch: int):
        self.arguments = [launch.arguments[name] for name in launch.kernel.arg_names]
        self.values = [0 if isinstance(value, Operand | Scratch) else value for value in self.arguments]
        self.operands = [(place, v.number) for place, v in enumerate(self.arguments) if isinstance(v, Operand)]
        self.scratch = [(place, v.offset) for place, v in enumerate(self.arguments) if isinstance(v, Scratch)]
        several = [(place, value) for place, value in enumerate(self.arguments) if _are_operands(value)]
        self.several = [(place, [operand.number for operand in value]) for place, value in several]
        self.launch = None
        options = {} if triton_private.is_interpreting() else launch.options
        if options:
            grid, given = (*launch.grid, 1, 1)[:3], self._addressed(addresses, scratch)
            self.launch = triton_private.launcher(launch.kernel, given, grid, options)
        self.dispatched = partial(launch.kernel[launch.grid], **options)

    def _addressed(self, addresses: Sequence[int], scratch: int) -> list[Any]:
        """The arguments as Triton's own dispatch takes them."""

        def address(of: Operand | Scratch) -> int:
            return addresses[of.number] if isinstance(of, Operand) else scratch + of.offset

        return [addressed(value, address) for value in self.arguments]

    def _filled(self, addresses: Sequence[int], scratch: int) -> list[Any]:
        """The arguments as a compiled kernel takes them."""
        values = self.values.copy()
        for place, number in self.operands:
            values[place] = addresses[number]
        for place, numbers in self.several:
            values[place] = tuple([addresses[number] for number in numbers])
        for place, offset in self.scratch:
            values[place] = scratch + offset
        return values

    def run(self, addresses: Sequence[int], scratch: int, stream: int | None) -> None:
        if self.launch is not None:
            self.launch(*self._filled(addresses, scratch), stream=stream)
        else:
            self.dispatched(*self._addressed(addresses, scratch))


@dataclass(frozen=True)
class Device:
    """What decides about regimes: multiprocessors, bytes of shared memory of a program, architecture (90: sm_90)."""

    multiprocessors: int = 132
    shared_memory: int = 232448
    architecture: int = 90


# Of some architectures, so that kernels compiled ahead do not depend on which device of them is here.
DEVICES = {80: Device(108, 166912, 80), 90: Device(), 100: Device(148, 232448, 100)}
_planned: ContextVar[Device | None] = ContextVar("planned", default=None)


@contextmanager
def planning(of: Device) -> Iterator[None]:
    """Meanwhile this thread makes programs for a device that need not be the current one."""
    token = _planned.set(of)
    try:
        yield
    finally:
        _planned.reset(token)


def device() -> Device:
    """The device that this thread plans for, else the current one; an H200 where there is none."""
    planned = _planned.get()
    if planned:
        return planned
    properties = triton_private.device_properties()
    return Device(**properties) if properties else Device()
