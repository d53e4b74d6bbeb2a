"""Loads and stores: parameters, global and shared memory, whole vectors at a time."""

from collections import namedtuple

import numpy as np

from ptx.memory import RANK, WORDS
from ptx.opcodes import Effect, Formula, opcode
from ptx.operands import address_of, names, parts, reader, writer
from ptx.parser import Address, Symbol
from ptx.types import U32, U64, Type

CACHED = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "weak")  # what a cache does with it, or may
PRIORITIES = ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
HINTS = (*CACHED, *[f"L1::{each}" for each in PRIORITIES], "L2::64B", "L2::128B", "L2::256B")


# What a load or store names: where, how many words of which type, how many bytes.
Access = namedtuple("Access", "space type count width")


def access(m, *spaces):
    """The modifiers of a load or store."""
    space = m.one(*spaces)
    for hint in HINTS:
        m.take(hint)
    m.take("L2::cache_hint")
    count, of = int(m.one("v2", "v4", "v8", default="v1")[1:]), m.type()
    return Access(space, of, count, of.bits // 8 * count)


@opcode("ld")
def load(m):
    found = access(m, "param", "global", "shared", "shared::cta", "shared::cluster")
    result, source = m.instruction.operands[:2]
    writers = [writer(each, found.type) for each in parts(result)]
    if len(writers) != found.count:
        raise m.unknown(f"expected {found.count} results")
    if found.space == "param":
        return _parameter(m, found, source)
    address = address_of(source, U64 if found.space == "global" else U32)
    fetch = {"global": fetch_global, "shared::cluster": fetch_cluster}.get(found.space, fetch_shared)

    def run(machine, instruction, mask):
        lanes = machine.active(mask)
        lanes, values = fetch(machine, instruction, lanes, address(machine)[lanes], found.width)
        words = values.view(found.type.raw).reshape(len(lanes), found.count)
        for place, write in enumerate(writers):
            whole, written = machine.scatter(lanes, words[:, place], found.type)
            write(machine, whole, written)

    return Effect(run)


def _parameter(m, found, source):
    if not isinstance(source, Address) or not isinstance(source.base, Symbol) or source.offset or found.count > 1:
        raise m.unknown("expected a whole parameter")
    name, write = source.base.name, writer(m.instruction.operands[0], found.type)

    def run(machine, instruction, mask):
        bits = machine.parameters[name] & ((1 << found.type.bits) - 1)
        write(machine, np.array(bits, found.type.raw).view(found.type.dtype), mask)

    return Effect(run)


@opcode("st")
def store(m):
    found = access(m, "global", "shared", "shared::cta")
    target, source = m.instruction.operands[:2]
    readers = [reader(each, Type("b", found.type.bits)) for each in parts(source)]
    if len(readers) != found.count:
        raise m.unknown(f"expected {found.count} words")
    address = address_of(target, U64 if found.space == "global" else U32)
    put = put_global if found.space == "global" else put_shared

    def run(machine, instruction, mask):
        lanes = machine.active(mask)
        words = [machine.spread(read(machine))[lanes] for read in readers]
        values = np.ascontiguousarray(np.stack(words, 1)).view(WORDS[found.width]).ravel()
        put(machine, instruction, lanes, address(machine)[lanes], values)

    return Effect(run)


# --- global memory ----------------------------------------------------------------------------------------------------


def settled(machine, instruction, lanes, addresses, width):
    """The lanes that may access global memory, where, and the allocations there."""
    lost = machine.lost([name for each in instruction.operands if isinstance(each, Address) for name in names(each)])
    if lost is not None:
        detail = "its address depends on a 32-bit number that lost its upper bits"
        machine.sanitizer.report_where(lost[lanes], "overflow", machine, instruction, lanes, detail, addresses)
    allowed, owners = machine.sanitizer.allowed(machine, instruction, lanes, addresses, width)
    if not allowed.all():
        lanes, addresses, owners = lanes[allowed], addresses[allowed], owners[allowed]
    return lanes, addresses, owners


def fetch_global(machine, instruction, lanes, addresses, width):
    """What lanes load; those that may not are left out."""
    lanes, addresses, owners = settled(machine, instruction, lanes, addresses, width)
    machine.sanitizer.written(machine, instruction, lanes, addresses, width, owners)
    machine.sanitizer.stamp(machine, instruction, lanes, addresses, width, owners, writes=False)
    return lanes, machine.memory.load(addresses, width)


def put_global(machine, instruction, lanes, addresses, values):
    width = values.dtype.itemsize
    kept, addresses, owners = settled(machine, instruction, lanes, addresses, width)
    values = values if len(kept) == len(lanes) else values[np.isin(lanes, kept)]
    machine.sanitizer.stamp(machine, instruction, kept, addresses, width, owners, writes=True)
    machine.memory.store(addresses, values)
    machine.memory.mark(addresses, width, owners)


# --- shared memory ----------------------------------------------------------------------------------------------------


def shared_places(machine, instruction, lanes, addresses, width, ctas=None):
    """The lanes that may access shared memory, and where it is; ctas: whose it is, if not their own."""
    shared, report = machine.shared, machine.sanitizer.report_where
    machine.sanitizer.checked += len(lanes)
    outside = ~shared.inside(addresses, width)
    skewed = addresses % np.asarray(width, addresses.dtype) != 0
    detail = f"{width} bytes outside of the {shared.size} of shared memory"
    report(outside, "bounds", machine, instruction, lanes, detail, addresses)
    detail = f"no multiple of {width} bytes in shared memory"
    report(skewed, "alignment", machine, instruction, lanes, detail, addresses)
    places = shared.places(addresses, machine.cta[lanes] if ctas is None else ctas)
    allowed = ~(outside | skewed)
    return (lanes, places) if allowed.all() else (lanes[allowed], places[allowed])


def fetch_shared(machine, instruction, lanes, addresses, width, ctas=None):
    lanes, places = shared_places(machine, instruction, lanes, addresses, width, ctas)
    unwritten = ~machine.shared.written[places[:, None] + np.arange(width)].all(1)
    detail = f"{width} bytes of shared memory that were never written, or are still on their way"
    at = places % machine.shared.pitch
    machine.sanitizer.report_where(unwritten, "uninitialised", machine, instruction, lanes, detail, at)
    machine.races.load(instruction, places, width, lanes)
    return lanes, machine.shared.load(places, width)


def fetch_cluster(machine, instruction, lanes, addresses, width):
    """Of the shared memory of a block of the cluster, as `mapa` names it; without a rank, of the own."""
    rank = (addresses >> np.uint32(RANK)).astype(np.int64)
    own = machine.cta[lanes]
    ctas = np.where(rank == 0, own, machine.cluster[lanes] * machine.launch.ctas + rank - 1)
    wrong = rank > machine.launch.ctas
    detail = "no block of the cluster has this rank"
    machine.sanitizer.report_where(wrong, "bounds", machine, instruction, lanes, detail)
    lanes, addresses, ctas = (each[~wrong] for each in (lanes, addresses, ctas))
    return fetch_shared(machine, instruction, lanes, addresses & np.uint32((1 << RANK) - 1), width, ctas)


def put_shared(machine, instruction, lanes, addresses, values):
    width = values.dtype.itemsize
    kept, places = shared_places(machine, instruction, lanes, addresses, width)
    values = values if len(kept) == len(lanes) else values[np.isin(lanes, kept)]
    same = machine.races.store(instruction, places, width, kept)
    machine.shared.store(places, values)
    machine.shared.written[places[:, None] + np.arange(width)] = True
    if same.any():
        report_different(machine, instruction, kept, places, values)


def report_different(machine, instruction, lanes, places, values):
    """Report lanes that wrote other values than a lane that wrote to the same place in the same instruction."""
    size = values.dtype.itemsize
    found = machine.shared.load(places, size)
    other = (found.view(np.uint8).reshape(-1, size) != values.view(np.uint8).reshape(-1, size)).any(1)
    detail = "another thread writes something else to the same place in this instruction"
    at = places % machine.shared.pitch
    machine.sanitizer.report_where(other, "race", machine, instruction, lanes, detail, at)


@opcode("mapa")
def map_address(m):
    """The address that a block's shared memory has in the cluster."""
    m.one("shared::cluster")
    of = m.type()
    if of != U32:
        raise m.unknown("expected u32")
    low = np.uint32((1 << RANK) - 1)
    return Formula([of], [of, U32], lambda address, rank: (address & low) + (rank + np.uint32(1) << np.uint32(RANK)))
