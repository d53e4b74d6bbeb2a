"""A kernel as the machine runs it: blocks of steps, and what is known of registers beforehand."""

from collections import Counter, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ptx.flow import order
from ptx.opcodes import Effect, decode
from ptx.operands import names, parts, reader, writer
from ptx.parser import Address, Instruction, PtxError, Symbol, parse
from ptx.types import PRED, named


@dataclass
class Step:
    """One instruction. last: registers that nothing reads behind it."""

    instruction: Instruction
    run: Callable
    guard: Callable | None
    last: Sequence[str] = ()


# Steps that run one after the other. following: the block that lanes go to which the last one does not send elsewhere.
Block = namedtuple("Block", "steps following")


class Program:
    """A kernel, decoded. granule, global_granule: bytes of the narrowest access to shared and to global memory."""

    def __init__(self, text):
        self.kernel = parse(text)
        self.addressing = _addressing(self.kernel.instructions)
        self.block_of_label = {}
        self.blocks = self._blocks([decode(each) for each in self.kernel.instructions])
        self.granule, self.global_granule = (
            min(_width(each, space) for each in self.kernel.instructions) for space in ("shared", "global")
        )

    def _blocks(self, effects):
        instructions, kernel = self.kernel.instructions, self.kernel
        targets = {each.name for i in instructions for each in i.operands if isinstance(each, Symbol)}
        starts = {kernel.labels[name] for name in targets & kernel.labels.keys()} | {0}
        starts |= {i + 1 for i, effect in enumerate(effects) if isinstance(effect, Effect) and effect.ends}
        firsts = sorted(starts - {len(instructions)})
        ends = [*firsts[1:], len(instructions)]
        place = {first: number for number, first in enumerate(firsts)}
        labels = {name: place.get(kernel.labels[name], len(firsts)) for name in targets & kernel.labels.keys()}
        ways = [_ways(instructions[end - 1], number, labels, len(firsts)) for number, end in enumerate(ends)]
        ordered = order(ways)
        rank = {number: at for at, number in enumerate(ordered)} | {len(firsts): len(firsts)}
        self.block_of_label = {name: rank[number] for name, number in labels.items()}
        found = []
        for number in ordered:
            steps = [self._step(instructions[i], effects[i]) for i in range(firsts[number], ends[number])]
            found.append(Block(steps, rank[number + 1]))
        _note_last_uses(found)
        return found

    def _step(self, instruction, effect):
        guard = None
        if instruction.guard is not None:
            register, negated = instruction.guard
            read = reader(register, PRED)
            guard = (lambda machine: ~read(machine)) if negated else read
        if isinstance(effect, Effect):
            return Step(instruction, lambda machine, mask: effect.run(machine, instruction, mask), guard)
        return Step(instruction, self._formula(instruction, effect), guard)

    def _formula(self, instruction, formula):
        """Read, compute, write."""
        operands = [part for each in instruction.operands for part in parts(each)]
        count, found = len(formula.results), len(operands)
        if found != (wanted := count + len(formula.sources)):
            raise PtxError(f"line {instruction.line}: {instruction.name} has {found} operands, expected {wanted}")
        writers = [writer(each, of) for each, of in zip(operands, formula.results, strict=False)]
        readers = [reader(each, of) for each, of in zip(operands[count:], formula.sources, strict=True)]
        compute, (write, *others) = formula.compute, writers
        if others:

            def run(machine, mask):
                values = compute(*[read(machine) for read in readers])
                for one, value in zip(writers, values, strict=True):
                    one(machine, value, mask)
        elif len(readers) == 2:
            left, right = readers

            def run(machine, mask):
                write(machine, compute(left(machine), right(machine)), mask)
        else:

            def run(machine, mask):
                write(machine, compute(*[read(machine) for read in readers]), mask)

        return self._watched(instruction, formula, operands, readers, run)

    def _watched(self, instruction, formula, operands, readers, run):
        """With what overflows noted, for instructions whose result becomes part of an address."""
        results = [name for each in operands[: len(formula.results)] for name in names(each)]
        signed = self.addressing.get(results[0]) if results else None
        if signed is None:
            return run
        sources = [name for each in operands[len(formula.results) :] for name in names(each)]
        overflows = formula.overflows

        def watch(machine, mask):
            lost = machine.lost(sources)
            if overflows is not None:
                wrong = overflows(signed, *[read(machine) for read in readers])
                if wrong.any():
                    lost = wrong if lost is None else lost | wrong
            machine.note_lost(results, lost, mask)
            run(machine, mask)

        return watch


def _ways(last, number, labels, end):
    """The blocks that may run behind a block with this last instruction."""
    ways = [labels[each.name] for each in last.operands if isinstance(each, Symbol) and each.name in labels]
    leaves = last.opcode in ("bra", "ret", "exit", "trap") and last.guard is None
    return [each for each in (ways if leaves else [number + 1, *ways]) if each < end]


def _width(instruction, space):
    """The bytes of an access to this space by a lane, 4 at most; 4 for any other instruction."""
    kinds = instruction.modifiers
    if instruction.opcode not in ("ld", "st") or not any(each.startswith(space) for each in kinds):
        return 4
    of = named(kinds[-1])
    count = next((int(each[1:]) for each in kinds if each in ("v2", "v4", "v8")), 1)
    return min(4, count * (of.bits if of else 8) // 8)


def _note_last_uses(blocks):
    """Registers of one block alone are dropped behind their last use."""
    home = {}
    for number, block in enumerate(blocks):
        for step in block.steps:
            for name in _names(step.instruction):
                home.setdefault(name, set()).add(number)
    for number, block in enumerate(blocks):
        seen = set()
        for step in reversed(block.steps):
            own = set(_names(step.instruction)) - seen
            step.last = [name for name in own if home[name] == {number}]
            seen |= own


def _names(instruction):
    found = [name for each in instruction.operands for name in names(each)]
    return found + ([instruction.guard[0].name] if instruction.guard else [])


THROUGH = ("add", "sub", "mul", "mad", "shl", "mov", "selp", "or", "min", "max", "cvt", "neg")


def _addressing(instructions):
    """The registers that become part of an address of global memory: whether they are extended with their sign.

    From addresses back through sums, products, selections and extensions; what bits are taken out of ends it.
    """
    made = {}
    for each in instructions:
        for part in (p for o in each.operands[:1] for p in parts(o)):
            for name in names(part):
                made.setdefault(name, []).append(each)
    found = {}
    reached = [o for each in instructions if ".global" in each.name for o in each.operands if isinstance(o, Address)]
    pending = [(name, True) for each in reached for name in names(each)]
    while pending:
        name, signed = pending.pop()
        if name in found:
            continue
        found[name] = signed
        for each in made.get(name, ()):
            if each.opcode in THROUGH:
                sources = [n for o in each.operands[1:] for p in parts(o) for n in names(p)]
                pending += [(source, _extends_sign(each, signed)) for source in sources]
    return found


def _extends_sign(instruction, signed):
    """Whether 32-bit operands are taken as signed: as the instruction says that makes 64 bits of them."""
    kinds = Counter(instruction.modifiers)
    if instruction.opcode == "cvt" or "wide" in kinds:
        return instruction.modifiers[-1].startswith("s")
    return signed
