"""The request that another process compiles the kernels of a call (`opgrad.cpu.compiler.processes`)."""

from typing import Any, NamedTuple

from opgrad.contract import DTYPES, Operator, Spec, only, spread
from opgrad.cpu.compiler.decorators import noting
from opgrad.cpu.compiler.target import object_cache
from opgrad.cpu.plans import plan
from opgrad.ops import public_operators


class Call(NamedTuple):
    """A call of an operator; one of the kernels of its plan is the requested one.

    needs: the results that it computes, None for all. lists: the lengths of its lists of inputs and of results.
    specs: shape and dtype of each array, None for one left out.
    """

    operator: str
    needs: tuple[str, ...] | None
    lists: tuple[int, int] | None
    specs: tuple[tuple[tuple[int, ...], str] | None, ...]
    attributes: dict[str, Any]

    def compile(self, name: str) -> bool:
        """Compile the kernel whose object code has this name; returns whether the cache has it."""
        specs = [None if each is None else Spec(each[0], DTYPES[each[1]]) for each in self.specs]
        with noting([name]):
            plan(self._expanded(), specs, self.attributes)
        return object_cache().read(name) is not None

    def _expanded(self) -> Operator:
        found = public_operators()[self.operator]
        if self.needs is not None:
            return only(found, tuple(self.needs))
        return found if self.lists is None else spread(found, *self.lists)
