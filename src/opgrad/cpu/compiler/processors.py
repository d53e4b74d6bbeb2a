"""The processors that kernels are compiled for by name, and what the processor that is here can do.

The levels of x86-64 are those of its System V ABI, which compilers and distributions share. Code for arm64 uses what
every such processor has.
"""

import ctypes
import functools
import hashlib
import platform
from collections.abc import Callable, Iterator
from typing import NamedTuple

from opgrad.cpu.compiler.machine_code import HERE, make_executable, new_memory


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
        found = sorted(_lines())
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _lines() -> Iterator[str]:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        yield from {line for line in file if line.startswith(DISTINCT)}


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
