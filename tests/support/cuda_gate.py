"""A gate that needs no GPU: the CUDA kernels of all kinds of calls, as the compiler makes them.

A kind of call has one level of each factor that the code branches on: operator, dtype, regime, whether rows are whole
vectors, how arrays lie, options. Their product is too large to compile. A test run compiles one kind for each kernel
that a call can reach, and among them every level of every factor; with OPGRAD_GATE=full there is every triple of
levels, and every combination of those factors that choose a kernel.

Kernels are told apart by what Triton compiles them for, so that each is compiled once. That is done in processes of
their own, because in that of the tests Triton may be an interpreter: the test file is a script as well. A run takes one
gate, with OPGRAD_CASES=all and in the full gate all.
"""

import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORT = str(Path(__file__).parent)
FULL = os.environ.get("OPGRAD_GATE") == "full"
PROCESSES = int(os.environ.get("OPGRAD_GATE_PROCESSES", (os.cpu_count() or 1) if FULL else 1))
TOGETHER = 3 if FULL else 1  # factors whose levels are combined in every way
CANDIDATES = 4  # completions of a combination, of which the one with most that is new is taken
TRIES = 40  # to find them
REGISTERS, MOST_REGISTERS = 65536, 255  # of a multiprocessor, of a thread
CHOSEN = (
    24  # bytes of a thread that are no fault where it could have more registers: the compiler lets more threads run
)
# Levels that stand there several times are taken as often where there is a choice.
POINTERS, ARCHITECTURES = ("aligned",) * 4 + ("unaligned",), (90,) * 4 + (80, 100)
DEVICES = {80: (108, 166912, 80), 90: (132, 232448, 90), 100: (148, 232448, 100)}  # A100; H100 and H200; B200

Kind = Mapping[str, Any]


@dataclass(frozen=True)
class Gate:
    """What is compiled together.

    factors: their levels; "arch" and "pointers", whether arrays begin at aligned addresses, are among them. program:
    that of a kind, or None if there is no such kind. few: levels that are combined in every way, so that each kernel
    is among them; full: the factors for which this is done in the full gate. there: factors of which all levels are
    among the kinds; chosen: which of those combined there are. holds: what else is asserted of the kinds. registers:
    of a thread, at most.
    """

    factors: Mapping[str, Sequence[Any]]
    program: Callable[[Kind], Any]
    few: Mapping[str, Sequence[Any]]
    full: Sequence[str]
    there: Sequence[str] = ()
    holds: Sequence[Callable[[Any], None]] = ()
    registers: int = 128
    chosen: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = lambda choice: [choice]

    @property
    def choice(self):
        """The levels that this run combines in every way."""
        return self.levels(self.full) if FULL else self.few

    def levels(self, names):
        return {name: self.factors[name] for name in names}

    def kinds(self):
        """Kinds with their programs, by name: all combinations of levels of the factors of each group are there."""
        groups = [self.choice]
        for names in itertools.combinations(self.factors, TOGETHER):
            groups.append(self.levels(names))
        numbers, found, covered = random.Random(0), {}, set()
        for group in groups:
            for levels in itertools.product(*group.values()):
                wanted = tuple(zip(group, levels, strict=True))
                if wanted not in covered:
                    for kind, program in self._best(wanted, groups, covered, numbers):
                        found["-".join(map(str, kind.values()))] = kind, program
                        covered |= _combinations(kind, groups)
        return found

    def _best(self, wanted, groups, covered, numbers):
        """Of some kinds with these levels, that which has most combinations that are new; none if there are none."""
        candidates = []
        for _ in range(TRIES):
            kind = {name: numbers.choice(levels) for name, levels in self.factors.items()} | dict(wanted)
            with on(kind["arch"]):
                program = self.program(kind)
            candidates += [(kind, program)] if program is not None else []
            if len(candidates) == CANDIDATES:
                break
        return sorted(candidates, key=lambda each: len(_combinations(each[0], groups) & covered))[:1]


def _combinations(kind, groups):
    return {tuple((name, kind[name]) for name in group) for group in groups}


# --- the script ------------------------------------------------------------------------------------------------------


@contextmanager
def on(arch):
    """As if on a device of this architecture."""
    from opgrad.cuda import execute, indexing, regimes

    found, users = execute.Device(*DEVICES[arch]), (regimes, indexing)
    for module in users:
        module.device = lambda: found
    try:
        yield
    finally:
        for module in users:
            module.device = execute.device


def specialised(value, aligned):
    """What Triton compiles a kernel for, of an argument that is no constant."""
    from opgrad.contract.signature import Operand
    from opgrad.cuda.execute import Scratch

    if isinstance(value, Operand | Scratch):
        return value.dtype, aligned or isinstance(value, Scratch)
    if isinstance(value, float):
        return "float"
    if isinstance(value, tuple):
        return tuple(specialised(each, aligned) for each in value)
    if isinstance(value, int) and value != 1:
        return value % 16 == 0, -(1 << 31) <= value < 1 << 31, value < 1 << 63
    return value


def key_of(launch, aligned, arch):
    """What tells a kernel from others as compiled."""
    key = [launch.kernel.fn.__module__, launch.kernel.fn.__name__, arch, launch.options]
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        constant = parameter.is_constexpr
        key.append(getattr(value, "__name__", value) if constant else specialised(value, aligned))
    return repr(key)


def compile_share(gate, share):
    """Compile every PROCESSES-th kernel from this one on; print what was found, and of what kernels kinds consist."""
    numbers = {}
    for name, (kind, program) in gate.kinds().items():
        aligned, own = kind["pointers"] == "aligned", []
        for launch in (*(program.checks if kind.get("check") else ()), *program.launches):
            key, arch = key_of(launch, aligned, kind["arch"]), kind["arch"]
            if key not in numbers and len(numbers) % PROCESSES == share:
                print(json.dumps(["kernel", len(numbers), report(launch, aligned, arch)]), flush=True)
            own.append(numbers.setdefault(key, len(numbers)))
        if share == 0:
            vector = max(map(vector_of, program.launches))
            print(json.dumps(["kind", name, kind, vector, own]), flush=True)


def vector_of(launch):
    """How many elements a thread can read at a time: a vector, unless its share of the tile is less."""
    arguments = dict(launch.arguments)
    for constants in (value for name, value in launch.arguments.items() if name in ("T", "C")):
        arguments |= {name.upper(): number.value for name, number in constants._asdict().items()}
    vector = arguments.get("VECTOR", 1)
    if "VECTORS" in arguments:  # tiles are made of whole vectors
        return vector
    tile = math.prod(arguments.get(name, 1) for name in ("PRES", "ROWS", "BLOCK"))
    return max(min(vector, tile // (32 * launch.warps)), 1)


def report(launch, aligned, arch):
    """What the compiler makes of a launch; under "error" its last words, where it makes nothing."""
    from opgrad.cuda.execute import Program
    from opgrad.cuda.inspect import compiled

    try:
        (found,) = compiled(Program([launch]), aligned, arch)
    except Exception as error:
        return {"name": launch.kernel.fn.__name__, "error": str(error.__cause__ or error)[-500:]}
    return vars(found) | {"ptx": "", "warps": launch.warps}


# --- the tests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """A kind of call, how many elements its kernels can read at a time, and what was found of each of them."""

    kind: Kind
    vector: int
    kernels: Sequence[Mapping[str, Any]]

    def widest(self, way):
        """Bytes of the widest of its loads or stores."""
        return max((int(width) for each in self.kernels for width in each.get(way, ())), default=0)


def compile_all(file, gate, folder):
    """What the script, a test file, compiles of a gate: kinds by name."""
    found = [folder / f"{share}.json" for share in range(PROCESSES)]  # a pipe would hold up who is not read
    processes = []
    for share, path in enumerate(found):
        with path.open("w") as output:
            processes.append(
                subprocess.Popen([sys.executable, file, gate, str(share)], env=environment(), stdout=output)
            )
    assert [process.wait() for process in processes] == [0] * PROCESSES
    lines = [json.loads(line) for path in found for line in path.read_text().splitlines()]
    kernels = {number: result for what, number, *rest in lines if what == "kernel" for result in rest}
    kinds = (rest for what, *rest in lines if what == "kind")
    return {name: Compiled(kind, vector, [kernels[each] for each in own]) for name, kind, vector, own in kinds}


def errors(kinds):
    """What the compiler said of the kinds that it refuses."""
    found = {name: [each["error"] for each in kind.kernels if "error" in each] for name, kind in kinds.items()}
    return {name: said for name, said in found.items() if said}


def spills(kinds):
    """The kinds with kernels that put registers by for want of them, and how many bytes of a thread."""

    def most(kind, kernel):
        return CHOSEN if kernel["registers"] < min(MOST_REGISTERS, REGISTERS // (32 * kernel["warps"])) else 0

    return _over(kinds, "spilled", most)


def over_registers(kinds, most):
    """The kinds whose kernels take more registers: of 128 a thread, a multiprocessor holds 512 threads.

    In few rows it has two programs to run at most, however many registers they take. Whether arrays begin at aligned
    addresses is not known when tiles are chosen.
    """

    def limit(kind, kernel):
        few = str(kind.get("regime", "")).startswith("few")
        return most + 32 if few or kind["pointers"] == "unaligned" else most

    return _over(kinds, "registers", limit)


def _over(kinds, resource, most):
    found = {
        name: [
            f"{kernel['name']}: {kernel[resource]} {resource}"
            for kernel in each.kernels
            if "error" not in kernel and kernel[resource] > most(each.kind, kernel)
        ]
        for name, each in kinds.items()
    }
    return {name: over for name, over in found.items() if over}


def missing(kinds, **levels):
    """The combinations of these factors' levels that are in no kind."""
    there = {tuple(each.kind[name] for name in levels) for each in kinds.values()}
    return [combination for combination in itertools.product(*levels.values()) if combination not in there]


def environment():
    """That of a process in which Triton compiles; opgrad is where this process has it."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, (SUPPORT, os.environ.get("PYTHONPATH"))))}
