"""What each opcode does, a family a file.

A formula takes the lanes' operands and returns the result; an effect also needs the machine: memory, other lanes.
Each takes the modifiers that it knows; one that is left over is an error that names the instruction.
"""

from collections import namedtuple
from functools import cache
from importlib import import_module

from ptx.parser import PtxError
from ptx.types import named

FAMILIES = ("integer", "floating", "conversion", "memory", "asynchronous", "control", "warp", "matrix")


# results, sources: the types of the operands. overflows(signed, *operands): the lanes whose result has other than its
# last 32 bits lost.
Formula = namedtuple("Formula", "results sources compute overflows", defaults=[None])
# run(machine, instruction, mask): mask is None where all lanes are active. ends: it ends a block.
Effect = namedtuple("Effect", "run ends", defaults=[False])


class Modifiers:
    """The modifiers of an instruction, taken one by one."""

    def __init__(self, instruction):
        self.instruction = instruction
        self.left = list(instruction.modifiers)
        self.types = [found for each in self.left if (found := named(each)) is not None]

    def take(self, *names):
        """Whether these modifiers are there, one behind the other."""
        for place in range(len(self.left)):
            if self.left[place : place + len(names)] == list(names):
                del self.left[place : place + len(names)]
                return True
        return False

    def one(self, *names, default=None):
        """Which of these modifiers is there."""
        found = [name for name in names if self.take(name)]
        if len(found) > 1 or not (found or default is not None):
            raise self.unknown(f"expected one of {', '.join(names)}")
        return found[0] if found else str(default)

    def type(self, packed=False):
        """The first type that is left; packed: it may be one of two values."""
        for name in self.left:
            found = named(name)
            if found is not None:
                self.left.remove(name)
                if found.packed and not packed:
                    raise self.unknown(f"no operation on .{name} is known")
                return found
        raise self.unknown("expected a type")

    def unknown(self, why):
        return PtxError(f"line {self.instruction.line}: {self.instruction.name}: {why}")

    def done(self):
        if self.left:
            raise self.unknown(f"unknown modifier .{self.left[0]}")


_decoders = {}


def opcode(*names, floating=None):
    """Register what decodes these opcodes; floating: those whose last type is a float, or is none."""

    def register(decoder):
        for name in names:
            _decoders[name, floating] = decoder
        return decoder

    return register


@cache
def _load():
    for family in FAMILIES:
        import_module(f"ptx.opcodes.{family}")


def decode(instruction):
    """What an instruction does. Raises PtxError for an opcode or a modifier that is not known."""
    _load()
    modifiers = Modifiers(instruction)
    floating = bool(modifiers.types) and modifiers.types[-1].is_float
    decoder = _decoders.get((instruction.opcode, None)) or _decoders.get((instruction.opcode, floating))
    if decoder is None:
        raise PtxError(f"line {instruction.line}: unknown instruction {instruction.name}")
    found = decoder(modifiers)
    modifiers.done()
    return found
