"""Loads and stores: parameters, global and shared memory, whole vectors at a time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ptx.memory import RANK, WORDS
from ptx.opcodes import Effect, Formula, Modifiers, opcode
from ptx.operands import address_of, parts, reader, writer
from ptx.parser import Address, Instruction, Symbol
from ptx.types import U32, U64, Type

if TYPE_CHECKING:
    from ptx.machine import Machine

CACHED = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak")  # what a cache does with it, or may
PRIORITIES = ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
HINTS = (*CACHED, *[f"L1::{each}" for each in PRIORITIES], "L2::64B", "L2::128B", "L2::256B")


@dataclass(frozen=True)
class Access:
    """What a load or store names: where, how many words of which type; whether it brings a policy of caching."""

    space: str
    type: Type
    count: int
    policy: bool

    @property
    def width(self) -> int:
        return self.type.bits // 8 * self.count


def access(m: Modifiers, *spaces: str) -> Access:
    """The modifiers of a load or store."""
    space = m.one(*spaces)
    for hint in HINTS:
        m.take(hint)
    policy = m.take("L2::cache_hint")
    count = int(m.one("v2", "v4", "v8", default="v1")[1:])
    return Access(space, m.type(), count, policy)


@opcode("ld")
def load(m: Modifiers) -> Effect:
    found = access(m, "param", "global", "shared", "shared::cta", "shared::cluster")
    result, source = m.instruction.operands[:2]
    writers = [writer(each, found.type) for each in parts(result)]
    if len(writers) != found.count:
        raise m.unknown(f"expected {found.count} results")
    if found.space == "param":
        return _parameter(m, found, source)
    address = address_of(source, U64 if found.space == "global" else U32)
    fetch = {"global": fetch_global, "shared::cluster": fetch_cluster}.get(found.space, fetch_shared)

    def run(machine: "Machine", instruction: Instruction, mask: np.ndarray | None) -> None:
        lanes = machine.active(mask)
        lanes, values = fetch(machine, instruction, lanes, address(machine)[lanes], found.width)
        words = values.view(found.type.raw).reshape(len(lanes), found.count)
        for place, write in enumerate(writers):
            whole, written = machine.scatter(lanes, words[:, place], found.type)
            write(machine, whole, written)

    return Effect(run)


def _parameter(m: Modifiers, found: Access, source: Address) -> Effect:
    if not isinstance(source, Address) or not isinstance(source.base, Symbol) or source.offset or found.count > 1:
        raise m.unknown("expected a whole parameter")
    name, write = source.base.name, writer(m.instruction.operands[0], found.type)

    def run(machine: "Machine", instruction: Instruction, mask: np.ndarray | None) -> None:
        bits = machine.parameters[name] & ((1 << found.type.bits) - 1)
        write(machine, np.array(bits, found.type.raw).view(found.type.dtype), mask)

    return Effect(run)


@opcode("st")
def store(m: Modifiers) -> Effect:
    found = access(m, "global", "shared", "shared::cta")
    target, source = m.instruction.operands[:2]
    readers = [reader(each, Type("b", found.type.bits)) for each in parts(source)]
    if len(readers) != found.count:
        raise m.unknown(f"expected {found.count} words")
    address = address_of(target, U64 if found.space == "global" else U32)
    put = put_global if found.space == "global" else put_shared

    def run(machine: "Machine", instruction: Instruction, mask: np.ndarray | None) -> None:
        lanes = machine.active(mask)
        words = [machine.spread(read(machine))[lanes] for read in readers]
        values = np.ascontiguousarray(np.stack(words, 1)).view(WORDS[found.width]).ravel()
        put(machine, instruction, lanes, address(machine)[lanes], values)

    return Effect(run)


# --- global memory ----------------------------------------------------------------------------------------------------


def settled(
    machine: "Machine", instruction: Instruction, lanes: np.ndarray, addresses: np.ndarray, width: int, way: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The lanes that may access global memory, where, and the allocations there."""
    lost = machine.lost([name for each in instruction.operands if isinstance(each, Address) for name in names_of(each)])
    if lost is not None and lost[lanes].any():
        wrong = lanes[lost[lanes]]
        detail = "its address depends on a 32-bit number that lost its upper bits"
        machine.sanitizer.report("overflow", machine, instruction, wrong, detail, int(addresses[lost[lanes]][0]))
    allowed, owners = machine.sanitizer.allowed(machine, instruction, lanes, addresses, width)
    if not allowed.all():
        lanes, addresses, owners = lanes[allowed], addresses[allowed], owners[allowed]
    return lanes, addresses, owners


def names_of(address: Address) -> list[str]:
    from ptx.operands import names

    return names(address)


def fetch_global(
    machine: "Machine", instruction: Instruction, lanes: np.ndarray, addresses: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """What lanes load; those that may not are left out."""
    lanes, addresses, owners = settled(machine, instruction, lanes, addresses, width, "load")
    machine.sanitizer.written(machine, instruction, lanes, addresses, width, owners)
    machine.sanitizer.stamp(machine, instruction, lanes, addresses, width, owners, writes=False)
    return lanes, machine.memory.load(addresses, width)


def put_global(
    machine: "Machine", instruction: Instruction, lanes: np.ndarray, addresses: np.ndarray, values: np.ndarray
) -> None:
    width = values.dtype.itemsize
    kept, addresses, owners = settled(machine, instruction, lanes, addresses, width, "store")
    values = values if len(kept) == len(lanes) else values[np.isin(lanes, kept)]
    machine.sanitizer.stamp(machine, instruction, kept, addresses, width, owners, writes=True)
    machine.memory.store(addresses, values)
    machine.memory.mark(addresses, width, owners)


# --- shared memory ----------------------------------------------------------------------------------------------------


def shared_places(
    machine: "Machine", instruction: Instruction, lanes: np.ndarray, addresses: np.ndarray, width: int,
    ctas: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """The lanes that may access shared memory, and where it is; ctas: whose it is, if not their own."""
    shared, report = machine.shared, machine.sanitizer.report
    machine.sanitizer.checked += len(lanes)
    outside = ~shared.inside(addresses, width)
    skewed = addresses % np.asarray(width, addresses.dtype) != 0
    if outside.any():
        detail = f"{width} bytes outside of the {shared.size} of shared memory"
        report("bounds", machine, instruction, lanes[outside], detail, int(addresses[outside.argmax()]))
    if skewed.any():
        detail = f"no multiple of {width} bytes in shared memory"
        report("alignment", machine, instruction, lanes[skewed], detail, int(addresses[skewed.argmax()]))
    places = shared.places(addresses, machine.cta[lanes] if ctas is None else ctas)
    allowed = ~(outside | skewed)
    return (lanes, places) if allowed.all() else (lanes[allowed], places[allowed])


def fetch_shared(
    machine: "Machine", instruction: Instruction, lanes: np.ndarray, addresses: np.ndarray, width: int,
    ctas: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    lanes, places = shared_places(machine, instruction, lanes, addresses, width, ctas)
    unwritten = ~machine.shared.written[places[:, None] + np.arange(width)].all(1)
    if unwritten.any():
        detail = f"{width} bytes of shared memory that were never written, or are still on their way"
        machine.sanitizer.report("uninitialised", machine, instruction, lanes[unwritten], detail,
                                 int(places[unwritten.argmax()] % machine.shared.pitch))  # fmt: skip
    machine.races.load(instruction, places, width, lanes)
    return lanes, machine.shared.load(places, width)


def fetch_cluster(
    machine: "Machine", instruction: Instruction, lanes: np.ndarray, addresses: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the shared memory of a block of the cluster, as `mapa` names it; without a rank, of the own."""
    rank = (addresses >> np.uint32(RANK)).astype(np.int64)
    own = machine.cta[lanes]
    ctas = np.where(rank == 0, own, machine.cluster[lanes] * machine.launch.ctas + rank - 1)
    if (rank > machine.launch.ctas).any():
        wrong = lanes[rank > machine.launch.ctas]
        machine.sanitizer.report("bounds", machine, instruction, wrong, "no block of the cluster has this rank")
        lanes, addresses, ctas = (each[rank <= machine.launch.ctas] for each in (lanes, addresses, ctas))
    return fetch_shared(machine, instruction, lanes, addresses & np.uint32((1 << RANK) - 1), width, ctas)


def put_shared(
    machine: "Machine", instruction: Instruction, lanes: np.ndarray, addresses: np.ndarray, values: np.ndarray
) -> None:
    width = values.dtype.itemsize
    kept, places = shared_places(machine, instruction, lanes, addresses, width)
    values = values if len(kept) == len(lanes) else values[np.isin(lanes, kept)]
    same = machine.races.store(instruction, places, width, kept)
    machine.shared.store(places, values)
    machine.shared.written[places[:, None] + np.arange(width)] = True
    if same.any():
        report_different(machine, instruction, kept, places, values)


def report_different(
    machine: "Machine", instruction: Instruction, lanes: np.ndarray, places: np.ndarray, values: np.ndarray
) -> None:
    """Report lanes that wrote other values than a lane that wrote to the same place in the same instruction."""
    found = machine.shared.load(places, values.dtype.itemsize)
    size = values.dtype.itemsize
    other = (found.view(np.uint8).reshape(-1, size) != values.view(np.uint8).reshape(-1, size)).any(1)
    if other.any():
        detail = "another thread writes something else to the same place in this instruction"
        machine.sanitizer.report("race", machine, instruction, lanes[other], detail,
                                 int(places[other.argmax()] % machine.shared.pitch))  # fmt: skip


@opcode("mapa")
def map_address(m: Modifiers) -> Formula:
    """The address that a block's shared memory has in the cluster."""
    m.one("shared::cluster")
    of = m.type()
    if of != U32:
        raise m.unknown("expected u32")
    low = np.uint32((1 << RANK) - 1)
    return Formula([of], [of, U32], lambda address, rank: (address & low) + (rank + np.uint32(1) << np.uint32(RANK)))
