"""The processor that code is compiled for, its vectors, and where code for it comes from: a cache or a pack.

The levels of x86-64 are those of its System V ABI, which compilers and distributions share. Code for arm64 uses what
every such processor has.

A pack holds the cache folders of several processors in one file, from which kernels are served without a compiler:
`opgrad compile --for` fills a folder for each processor, and puts them into a ZIP archive. A wheel carries one beside
this package, or the variable OPGRAD_KERNELS names another; then kernels come from it, and Numba compiles, where it is
installed, only what the pack lacks. Like the files in the cache, the code is executed. So a pack is read only if nobody
else can write to it, if its checksums, which are the cache's, are right, and if it was made by the sources and for the
build of Python that read it: the file MADE_WITH says so.
"""

import ctypes
import functools
import hashlib
import io
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from opgrad.cpu.compiler import cache, machine_code, sources
from opgrad.cpu.compiler.cache import MOST_BYTES, SUFFIX, ObjectCache, directory
from opgrad.cpu.compiler.machine_code import HERE, make_executable, new_memory
from opgrad.cpu.compiler.words import CACHE_LINE


class Processor(NamedTuple):
    """What code is compiled for.

    architecture: as `platform.machine` names it. cpu, features: as LLVM spells them. needs: the bits that CPUID must
    have set, as (leaf, subleaf, register, bit numbers); xcr0: those of the registers that the system must save.
    """

    architecture: str
    cpu: str
    features: str
    needs: tuple[tuple[int, int, str, tuple[int, ...]], ...] = ()
    xcr0: int = 0

    @property
    def triple(self) -> str:
        return f"{self.architecture}-unknown-linux-gnu"


ADVANCED = 0x80000001
_V2 = ((1, 0, "c", (0, 9, 13, 19, 20, 23)), (ADVANCED, 0, "c", (0,)))  # SSE 3 to 4.2, CX16, POPCNT; LAHF
_V3 = (*_V2, (1, 0, "c", (12, 22, 27, 28, 29)), (7, 0, "b", (3, 5, 8)), (ADVANCED, 0, "c", (5,)))  # FMA to LZCNT
_V4 = (*_V3, (7, 0, "b", (16, 17, 28, 30, 31)))  # AVX-512 F, DQ, CD, BW, VL
_BF16 = (*_V4, (7, 1, "a", (5,)))
_SSE = "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+sahf"
_AVX2 = f"{_SSE},+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+xsave"
_AVX512 = f"{_AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,-prefer-256-bit"
# By name, from the least to the most that a processor has.
PROCESSORS = {
    "x86-64-v2": Processor("x86_64", "x86-64-v2", _SSE, _V2),
    "x86-64-v3": Processor("x86_64", "x86-64-v3", _AVX2, _V3, 0b110),
    "x86-64-v4": Processor("x86_64", "x86-64-v4", _AVX512, _V4, 0b11100110),
    "x86-64-v4-bf16": Processor("x86_64", "x86-64-v4", f"{_AVX512},+avx512bf16", _BF16, 0b11100110),
    "aarch64": Processor("aarch64", "generic", "+neon,+fp-armv8"),
}

# The vector registers of x86-64 that are wider than 16 bytes, by their size, and the processors that have them.
WIDE = {
    64: Processor("x86_64", "", "+avx512f", ((7, 0, "b", (16,)),), 0b11100110),
    32: Processor("x86_64", "", "+avx2", ((7, 0, "b", (5,)),), 0b110),
}

# --- the processor that is here --------------------------------------------------------------------------------------

# void ask(uint32_t leaf, uint32_t subleaf, uint32_t answer[4]): eax, ebx, ecx and edx of CPUID. Then a function that
# returns XCR0, the registers that the system saves: push rbx; mov r8, rdx; mov eax, edi; mov ecx, esi; cpuid;
# mov [r8], eax; …; pop rbx; ret; and xor ecx, ecx; xgetbv; shl rdx, 32; or rax, rdx; ret.
ASK = bytes.fromhex("53 4989d0 89f8 89f1 0fa2 418900 41895804 41894808 4189500c 5b c3")
SAVED = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3")
# Leaf, subleaf and registers that tell one kind of CPU from another, as LLVM reads them; the others name the core.
LEAVES = (
    *((0, 0, "abcd"), (1, 0, "acd"), (7, 0, "abcd"), (7, 1, "abcd"), (7, 2, "abcd"), (0xD, 1, "a"), (0x14, 0, "abcd")),
    *((0x19, 0, "b"), (0x1E, 1, "a"), (0x24, 0, "abcd"), (ADVANCED, 0, "acd"), (0x80000008, 0, "b")),
)
EXTENDED = 0x80000000
SYSTEM_SAVES = 1 << 27  # in ecx of leaf 1: there is an XCR0
DISTINCT = ("Features", "CPU ")  # how the lines of /proc/cpuinfo begin that tell one kind of arm64 from another


@functools.cache
def _functions() -> tuple[Callable[[int, int], dict[str, int]], Callable[[], int]]:
    """The answer of CPUID to a leaf and a subleaf, by register; and XCR0."""
    code = new_memory(len(ASK + SAVED))
    make_executable(code, ASK + SAVED)
    number = ctypes.c_uint32
    ask = ctypes.CFUNCTYPE(None, number, number, ctypes.c_void_p)(code)

    def of(leaf: int, subleaf: int) -> dict[str, int]:
        answer = (number * 4)()
        ask(leaf, subleaf, ctypes.addressof(answer))
        return dict(zip("abcd", answer, strict=True))

    saved = ctypes.CFUNCTYPE(ctypes.c_uint64)(code + len(ASK))
    return of, lambda: saved() if of(1, 0)["c"] & SYSTEM_SAVES else 0


def _answer(leaf: int, subleaf: int, registers: str) -> list[int] | None:
    """These registers of an answer of CPUID; None if the processor does not know the leaf."""
    of, _ = _functions()
    return [of(leaf, subleaf)[each] for each in registers] if leaf <= of(leaf & EXTENDED, 0)["a"] else None


@functools.cache
def cpu() -> str:
    """A digest of what the CPU says it can do: where it is the same, LLVM makes the same code."""
    if platform.machine() == "x86_64":
        found: object = [_answer(*leaf) for leaf in LEAVES], _functions()[1]()
    else:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            found = sorted({line for line in file if line.startswith(DISTINCT)})
    return hashlib.sha256(repr(found).encode()).hexdigest()


@functools.cache
def is_here(processor: Processor) -> bool:
    """Whether code for this processor runs on the one that is here. Linux tells; elsewhere the answer is no."""
    if not HERE or processor.architecture != platform.machine():
        return False
    if not processor.needs:
        return True
    for leaf, subleaf, register, bits in processor.needs:
        answer = _answer(leaf, subleaf, register)
        if answer is None or not all(answer[0] >> bit & 1 for bit in bits):
            return False
    return _functions()[1]() & processor.xcr0 == processor.xcr0


PACK_VARIABLE = "OPGRAD_KERNELS"
CARRIED = os.path.join(sources.ROOT, "opgrad", "kernels.pack")  # that of a wheel
MADE_WITH = "made_with.json"
MOST_PACK = 1 << 30  # bytes; the plain calls of all operators take 4 MB for each processor
COMPILER = 'pip install "opgrad[compiler]"'  # brings Numba
NO_TIME = (1980, 1, 1, 0, 0, 0)  # the first that an archive can state: equal folders make equal packs


class PackError(RuntimeError):
    """A pack cannot be used; the message says why, and what to do."""


class OutdatedError(PackError):
    """A pack was made with another release, other sources or another Python."""


class LackingError(NotImplementedError):
    """The pack that serves kernels lacks one; the message names it."""


def python_build() -> list[Any]:
    """The build of Python that code is for: it reads fields of objects, and is found by the bytecode of its source."""
    return [sys.implementation.cache_tag, object.__basicsize__, sys.maxsize, sys.platform]


def made_with() -> dict[str, Any]:
    """What a pack must have been made with, to be of use here."""
    release, compiler = sys.modules["opgrad"].__version__, sources.COMPILER  # the package is always imported first
    return {"opgrad": release, "python": python_build(), "sources": compiler.hex() if compiler else ""}


def packed(folder: str) -> bytes:
    """The bytes of a pack with the cache folders that lie in this folder, each named by its processor."""
    from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        archive.writestr(ZipInfo(MADE_WITH, NO_TIME), json.dumps(made_with()))
        for processor in sorted(os.listdir(folder)):
            for name in sorted(os.listdir(os.path.join(folder, processor))):
                if name.endswith(SUFFIX):
                    with open(os.path.join(folder, processor, name), "rb") as code:
                        archive.writestr(ZipInfo(f"{processor}/{name}", NO_TIME), code.read(), ZIP_DEFLATED, 9)
    return file.getvalue()


class Pack:
    """A pack. Raises PackError if it cannot be used.

    path: absolute. trusted: whether its folder needs no check, since the package itself was imported from there.
    names: of its kernels, by processor.
    """

    def __init__(self, path: str, trusted: bool = False):
        from zipfile import ZipFile

        self.path = path
        try:
            data = cache.contents(*os.path.split(path), MOST_PACK, sticky=True, trusted=trusted)
        except cache.UntrustedError as problem:
            raise PackError(f"{path} is not used: {problem}") from None
        except OSError as error:
            raise PackError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self._archive = ZipFile(io.BytesIO(data))
            index = json.loads(self.contents(MADE_WITH))
        except Exception:  # of many kinds, according to where the archive is damaged
            expected = "expected a file made by `opgrad compile --for`"
            raise PackError(f"{path} is no pack of kernels, or is damaged: {expected}") from None
        for what, here in made_with().items():
            there = index.get(what) if isinstance(index, dict) else None
            if there != here:
                told = "other sources of opgrad" if what == "sources" else f"{what} {_shown(there)}, not {_shown(here)}"
                raise OutdatedError(f"{self.path} was made with {told}: make it anew with `opgrad compile --for`")
        self.names: dict[str, list[str]] = {}
        for file in self._archive.namelist():
            processor, _, name = file.partition("/")
            if name.endswith(SUFFIX):
                self.names.setdefault(processor, []).append(name.removesuffix(SUFFIX))

    def contents(self, file: str) -> bytes:
        """The bytes of a file in the pack; any exception if it is damaged."""
        if self._archive.getinfo(file).file_size > MOST_BYTES:
            raise ValueError
        return self._archive.read(file)

    def processor(self, wanted: str | None) -> str:
        """The name of the processor whose kernels are used: `wanted` if the pack has it, else the best that is here."""
        here = [name for name, processor in PROCESSORS.items() if is_here(processor)]
        fitting = [name for name in here if name in self.names]
        if not fitting:
            known = f"which is {here[-1]}" if here else "of which none is known"
            text = f"{self.path} has kernels for {', '.join(self.names)}, not for the processor here, {known}"
            raise PackError(f"{text}: {PACK_VARIABLE}= and {COMPILER} compile them here")
        return wanted if wanted in fitting else fitting[-1]


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


class PackedObjects(ObjectCache):
    """The cache folder of a processor in a pack, and behind it the cache of what the pack lacks.

    compiled: environment and folder of that cache; None where no compiler is installed.
    """

    def __init__(self, pack: Pack, processor: str, compiled: tuple[str, str | None] | None = None):
        super().__init__(*(compiled or (processor, None)))
        self.pack, self.name, self.compiles = pack, processor, compiled is not None

    def read(self, name: str, suffix: str = SUFFIX) -> bytes | None:
        """The code of a kernel; None if it is neither in the pack nor compiled. PackError if the pack is damaged."""
        if name not in self.pack.names.get(self.name, ()):
            return super().read(name, suffix)
        try:
            code = ObjectCache(self.name, None).checked(name, self.pack.contents(f"{self.name}/{name}{suffix}"))
        except Exception:  # of many kinds, as above
            code = None
        if code is None:
            raise PackError(f"{self.pack.path} is damaged: its checksum is wrong")
        return code

    def count(self) -> int:
        return len(self.pack.names[self.name]) + super().count()

    def problem(self) -> str:
        if self.compiles:
            return super().problem()
        return f"they come from {self.pack.path}, and Numba is not installed: {COMPILER}"

    def lacking(self, kernel: str) -> LackingError:
        """The exception for a kernel that the pack lacks."""
        advice = f"{COMPILER} compiles it here"
        if self.pack.path != CARRIED:
            program = shlex.join(sys.argv) if sys.argv and os.path.isfile(sys.argv[0]) else "PROGRAM.py"
            command = f"opgrad compile --for {self.name} --run {shlex.quote(program)} -o {shlex.quote(self.pack.path)}"
            advice += f"; or, where Numba is installed, `{command}` adds those of the program"
        return LackingError(f"{self.pack.path} has no kernel {kernel} for {self.name}; {advice}")


class Packing(ObjectCache):
    """The cache where code is compiled for a pack: a second folder gets all code that is read or written."""

    def __init__(self, environment: str, directory: str | None, packed: ObjectCache):
        super().__init__(environment, directory)
        self._packed = packed

    def read(self, name: str, suffix: str = SUFFIX) -> bytes | None:
        code = super().read(name, suffix)
        if code is not None and suffix == SUFFIX:
            self._packed.write(name, code)
        return code

    def write(self, name: str, code: bytes, suffix: str = SUFFIX) -> None:
        super().write(name, code, suffix)
        if suffix == SUFFIX:
            self._packed.write(name, code)


def is_compiler_installed() -> bool:
    return find_spec("numba") is not None


@functools.cache
def served() -> tuple[Pack, str] | None:
    """The pack that OPGRAD_KERNELS names, else the one that a wheel carries, and the processor whose kernels are used.

    None if there is none, or "" is named, or a wheel's pack is not for the processor here, and Numba is installed.
    """
    named = os.environ.get(PACK_VARIABLE)
    if named == "" or (named is None and not os.path.exists(CARRIED)):
        return None
    pack = Pack(CARRIED if named is None else os.path.join(os.getcwd(), named), trusted=named is None)
    try:
        return pack, pack.processor(os.environ.get("NUMBA_CPU_NAME"))
    except PackError:
        if named is None and is_compiler_installed():
            return None
        raise


ARM = "aarch64", "arm64"  # Linux, and others
# In processes that compile for a pack: the name of the processor, the folder that gets the code, and a variable that is
# set where the code of another processor is run, too.
VARIABLE, PACKS_INTO, STANDS_IN = "OPGRAD_COMPILES_FOR", "OPGRAD_PACKS_INTO", "OPGRAD_STANDS_IN"


@functools.cache
def named() -> Processor | None:
    """The processor by whose name code is compiled or served, as for packs; None if it is the one that is here."""
    if VARIABLE in os.environ:
        return PROCESSORS[os.environ[VARIABLE]]
    found = served()
    return PROCESSORS[found[1]] if found else None


def runs_here() -> bool:
    """Whether code is for the processor that is here."""
    processor = named()
    return processor is None or is_here(processor)


def stands_in() -> bool:
    """Whether other code is compiled besides and run in place of code for another processor."""
    return STANDS_IN in os.environ


def architecture() -> str:
    """That of the processor which code is for, as `platform.machine` names it."""
    processor = named()
    return processor.architecture if processor else platform.machine().lower()


def host() -> tuple[str, str]:
    """The CPU's name and features as LLVM spells them; NUMBA_CPU_NAME and NUMBA_CPU_FEATURES override.

    For a pack they are those of the processor by whose name its code was compiled.
    """
    processor = named()
    if processor:
        return processor.cpu, processor.features
    name, features = _overrides()
    own = ("", "") if features is not None and name else told_by_llvm()
    name = name or own[0]
    return name, ("" if name == "generic" else own[1]) if features is None else features


def _overrides() -> tuple[str | None, str | None]:
    return os.environ.get("NUMBA_CPU_NAME") or None, os.environ.get("NUMBA_CPU_FEATURES")


@functools.cache
def told_by_llvm() -> tuple[str, str]:
    """The name and the features of this CPU."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


@functools.cache
def object_cache() -> Any:
    """Where object code is kept for this CPU, this compiler and this Python; before it the pack that serves kernels."""
    if PACKS_INTO in os.environ:
        folder = ObjectCache(os.environ[VARIABLE], os.environ[PACKS_INTO])
        return Packing(environment(), directory(), folder)
    found = served()
    compiled = (environment(), directory()) if found is None or is_compiler_installed() else None
    return PackedObjects(*found, compiled) if found else ObjectCache(*compiled)


def environment() -> str:
    """A digest of what code is compiled by and for."""
    # Where the fields of an array are is compiled in; it differs between builds of one version of Python.
    overrides = _overrides()
    given = named() or not machine_code.HERE or None not in overrides
    cpu_kind = host() if given else (*overrides, cpu())  # names and features that are given, else what the CPU says
    found = (_release("numba"), _release("llvmlite"), cpu_kind, (*python_build(), architecture()))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:24]


def _release(package: str) -> str:
    """A package's version, by the file that states it: reading it takes 0.1 ms, `importlib.metadata` 100."""
    found = find_spec(package)
    stated = sources.of_file(os.path.join(os.path.dirname(found.origin), "_version.py")) if found else None
    if stated:
        return stated.hex()
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        raise ImportError(
            f"opgrad: {package} is not installed, which compiles kernels, and {PACK_VARIABLE} names no pack of them: "
            f"{COMPILER}, or make a pack where it is installed, with `opgrad compile --for`"
        ) from None


@functools.cache
def vector_bytes() -> int:
    """The size of the host's vector registers. On Linux CPUID tells, so that llvmlite is not needed for that."""
    name, features = _overrides()
    asks = machine_code.HERE and named() is None and features is None and name != "generic"
    told = () if asks else host()[1].split(",")
    return next((size for size, each in WIDE.items() if (is_here(each) if asks else each.features in told)), 16)


def many_registers() -> bool:
    """Whether there are 32 vector registers, not 16."""
    return vector_bytes() == 64 or architecture() in ARM


def vector_lanes(dtype: str) -> int:
    """Elements in a kernel's vectors when it computes in float32 or float64: two registers full."""
    return 2 * vector_bytes() // (8 if dtype == "float64" else 4)


def interface_of(lanes: int, dtype: str) -> str:
    """The interface of a task whose vectors have so many elements; see `Kernel.task`."""
    return "task" if lanes == vector_lanes(dtype) else f"task of {lanes}"


def line_lanes(dtype: str, item: int) -> int:
    """Elements in the vectors of a kernel that writes whole cache lines of elements of `item` bytes.

    Two registers of 32 bytes hold 16 numbers, and 16 results of two bytes are half a line, which would be written to
    memory by itself. Vectors have four registers at most: with eight of 16 bytes, gradients found no registers for
    their values.
    """
    usual = vector_lanes(dtype)
    return max(usual, min(CACHE_LINE // item, 2 * usual))
