"""Runs operators on other libraries' arrays in the host's memory: the NumPy kernels, given addresses alone.

No NumPy array is made of them: PyTorch never again resizes a tensor of which NumPy has had a view, not even in place
of a result (`out=`), and sharded training resizes its parameters in every step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from opgrad.contract import Operator
from opgrad.interop import Memory
from opgrad.interop.device import Signature, as_tuple, extent, pack, unpack
from opgrad.native.arrays import Execution, one_or_tuple
from opgrad.native.entries import Answered
from opgrad.native.functions import note
from opgrad.native.overlap import check_overlap
from opgrad.native.plans import plan


class HostPlan(Execution):
    """A signature's plan, run on the addresses of its arrays, which the call keeps alive."""

    def __init__(self, memory: Memory, op: Operator, given: Mapping[str, Any]):
        signature = Signature(memory, op, given, any_stride=False)
        self.names, self.makers = signature.names, signature.makers
        inputs = signature.specs[: len(self.names)]
        outputs = signature.specs[len(self.names) :] if signature.brought else signature.made
        self.specs = [*inputs, *outputs]
        super().__init__(plan(op, inputs, signature.attributes, outputs), [True] * len(self.specs), addresses=True)
        self.memory, self.address_of = memory, memory.address
        self.nowhere = sum(1 for spec in self.specs if spec is None or 0 in spec.shape)
        self.finish = op.finish or one_or_tuple

    def run(self, given: Mapping[str, Any]) -> Any:
        """Run on arrays of this signature, given by parameter name."""
        operands = [given.get(name) for name in self.names]
        out = given.get("out")
        results: Sequence[Any] = [make() for make in self.makers] if out is None else as_tuple(out)
        operands += results
        if self.plan.copies:
            self._execute_on_copies(operands, results)
        else:
            self.execute(self._addresses(operands), out is None)
        note(Answered(self, operands, results, out is None, None))
        return self.finish(tuple(results))

    def _addresses(self, operands: Sequence[Any]) -> list[int]:
        """Where the operands lie. Raises ValueError for an array whose memory its library has given back."""
        address_of = self.address_of
        addresses = [0 if each is None else address_of(each) for each in operands]
        if addresses.count(0) > self.nowhere:
            raise self._lost(addresses)
        return addresses

    def _lost(self, addresses: Sequence[int]) -> ValueError:
        named = zip((*self.names, *self.op.results), self.specs, addresses, strict=True)
        name = next(name for name, spec, address in named if spec and not address and 0 not in spec.shape)
        return ValueError(f"{self.op.name}: {name} has no memory, expected an array whose storage is allocated")

    def _execute_on_copies(self, operands: list[Any], results: Sequence[Any]) -> None:
        """Run on copies of the arrays that kernels cannot use where they lie."""
        self.check_overlap(self._addresses(operands))
        pack(self.memory, self.plan.copies, operands)
        self.execute(self._addresses(operands), trusted=True)
        unpack(self.memory, self.plan.copies, operands, results)

    def check_overlap(self, operands: Sequence[int]) -> None:
        """Raise ValueError if a result overlaps another operand in a way that is not allowed, by their addresses."""
        places = zip(operands, self.specs, strict=True)
        check_overlap(self.op, [None if spec is None else extent(address, spec) for address, spec in places])
