"""Runs operators on arrays in a CUDA device's memory, whatever library they come from.

As for NumPy, a signature's plan is made once and kept. A warm call asks each array for its key, finds the plan,
makes the results and launches the kernels with nothing but addresses.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from opgrad import cuda
from opgrad.call.arrays import Runner
from opgrad.call.owners import DeviceMemory, arrays_of
from opgrad.contract import Operator, Spec
from opgrad.contract.signature import is_plain, plain
from opgrad.cpu.plans import RUNNERS, Kept
from opgrad.cpu.runtime.plan import couples_of, touch

# From what is no array of the library, or, such as a list, cannot be part of a key.
ERRORS = (AttributeError, TypeError, RuntimeError, ValueError)


class Runners:
    """The runners of one library's calls, by signature.

    `settle` sees the arguments of each new signature: it raises where no plan can be made for them, and returns
    them as the contract takes them, a library's own dtypes as NumPy's. `make` makes the runner.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        settle: Callable[[Operator, Mapping[str, Any]], Mapping[str, Any]],
        make: Callable[[Any, Operator, Mapping[str, Any]], Runner] | None = None,
    ):
        self.memory, self.settle, self.make = memory, settle, make or DeviceRunner
        self.kept = Kept[Runner](RUNNERS)

    def run(self, op: Operator, given: Mapping[str, Any]) -> Any:
        """Run an operator on arrays given by parameter name, all on one device, which is the current one."""
        try:
            runner = self.kept.get(self._key(op, given))
        except ERRORS:
            runner = None
        return (runner or self._settled(op, given)).run(given)

    def _settled(self, op: Operator, given: Mapping[str, Any]) -> Runner:
        """The runner of a call whose attributes may come in arrays; a new one, which is kept if its key can be."""
        settled = plain(op, given)
        try:
            key = self._key(op, settled)
            runner = self.kept.get(key)
        except ERRORS:
            return self.make(self.memory, op, self.settle(op, settled))
        if runner is None:
            runner = self.make(self.memory, op, self.settle(op, settled))
            if all(is_plain(settled[name]) for name in settled if name not in op.inputs and name != "out"):
                self.kept.keep(key, runner)
        return runner

    def _key(self, op: Operator, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arrays by their keys, all else by value and type, which tells 1 from True."""
        of = self.memory.key
        key: list[Any] = [op]  # the plain and the general forms of an operator have the same name
        for name, value in given.items():
            if name in op.inputs:
                key.append((name, None if value is None else of(value)))
            elif name != "out":
                key.append((name, value, type(value)))
            elif value is not None:
                key.append((name, *map(of, value)) if type(value) is tuple else (name, of(value)))
        return tuple(key)


class DeviceRunner(Runner):
    """Runs the calls of one signature on CUDA, by a program that is compiled for the alignments of its arrays."""

    memory: DeviceMemory

    def __init__(self, memory: DeviceMemory, op: Operator, given: Mapping[str, Any]):
        super().__init__(memory, op, given, any_stride=True)
        for name, array in arrays_of(op, given).items():
            size = memory.spec(array).dtype.itemsize
            if memory.address(array) % size:  # elements lie across words: a device cannot read them, nor copy them
                wrong = f"begins at an address that is no multiple of {size} bytes, the size of its elements"
                raise ValueError(f"{op.name}: {name} {wrong}, expected an aligned array")
        if importlib.util.find_spec("triton") is None:
            raise ImportError(
                f'{op.name}: CUDA kernels need Triton, which is not installed: pip install "opgrad[cuda]"'
            )
        self.couples, self.program = couples_of(self.problem), op.kernel(cuda.__name__)(self.problem)
        self.scratch = None
        if self.program.scratch_bytes:
            spec = Spec((self.program.scratch_bytes,), np.dtype(np.uint8), (1,))
            self.scratch = memory.maker(spec, given[op.arrays[self.like]])
        self.compiled: Any = None
        self.checks: Any = None

    def execute(self, operands: Sequence[Any], trusted: bool) -> None:
        """Launch the kernels on the stream on which the caller works.

        Results that span bytes of other operands, which is rare, are settled element by element, as for NumPy.
        """
        memory, addresses = self.memory, self.addresses(operands)
        if not trusted and any(touch(each, addresses[each.a], addresses[each.b]) for each in self.couples):
            self.check_overlap(operands)
        scratch = self.scratch and self.scratch()
        base = 0 if scratch is None else memory.address(scratch)
        stream = memory.stream(operands[self.like])
        if self.compiled is None:
            from opgrad.cuda.execute import Compiled, Program

            if self.program.checks and self.problem.attributes.get("check"):
                self.checks = Compiled(Program(self.program.checks), addresses, base)
            self.compiled = Compiled(self.program, addresses, base)
        if self.checks is not None:
            self.checks.run(addresses, base, stream)
            position, value = memory.words(scratch)
            if position >= 0:
                raise self.program.explain(position, value)
        self.compiled.run(addresses, base, stream)
