"""How instructions read and write their operands, settled once for each instruction."""

import numpy as np

from ptx.parser import Address, Immediate, Not, Pair, PtxError, Register, Sink, Special, Symbol, Vector
from ptx.types import U64, extended, immediate, resized


def reader(operand, of):
    """What reads an operand as an array of a type: an entry a lane, or one for all."""
    if isinstance(operand, Register):
        return _of_register(operand, of)
    if isinstance(operand, Immediate):
        constant = immediate(operand.text, of)
        return lambda machine: constant
    if isinstance(operand, Not):
        plain = _of_register(operand.register, of)
        return lambda machine: ~plain(machine)
    if isinstance(operand, Special):
        name = operand.name
        return lambda machine: machine.special(name).astype(of.raw).view(of.dtype)
    if isinstance(operand, Symbol):
        name = operand.name
        return lambda machine: np.array(machine.symbol(name), of.raw)
    raise PtxError(f"{operand} is no operand to be read")


def _of_register(register, of):
    bits, dtype = register.type.bits, of.dtype
    if bits == of.bits:
        return lambda machine: machine.register(register).view(dtype)
    return lambda machine: resized(machine.register(register), bits, of).view(dtype)


def address_of(operand, of=U64):
    """What reads [base + offset]."""
    if not isinstance(operand, Address):
        raise PtxError(f"{operand} is no address")
    base, offset = reader(operand.base, of), of.dtype(operand.offset & ((1 << of.bits) - 1))
    return lambda machine: machine.spread(base(machine) + offset)


def writer(operand, of):
    """What writes a result to an operand, in the lanes of a mask."""
    if isinstance(operand, Sink):
        return lambda machine, value, mask: None
    if not isinstance(operand, Register):
        raise PtxError(f"{operand} is no operand to be written")
    name, bits = operand.name, operand.type.bits

    def write(machine, value, mask):
        value = np.asarray(value)
        raw = value.view(of.raw) if bits == of.bits else extended(value, of, bits)
        if mask is not None:
            raw = np.where(mask, raw, machine.register(operand))
        elif raw.ndim == 0:
            raw = machine.spread(raw)
        machine.registers[name] = raw

    return write


def parts(operand):
    """The operands that a vector, or a pair of results, is made of."""
    if isinstance(operand, Vector):
        return operand.items
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand,)


def names(operand):
    """The registers in an operand."""
    if isinstance(operand, Register):
        return [operand.name]
    if isinstance(operand, Not):
        return [operand.register.name]
    if isinstance(operand, Address):
        return names(operand.base)
    return [name for each in parts(operand) if each is not operand for name in names(each)]
