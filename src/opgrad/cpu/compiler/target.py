"""The CPU that code is compiled for, how wide its vectors are, and where code for it is kept."""

import functools
import hashlib
import os
import platform
from importlib.util import find_spec
from typing import Any

from opgrad.cpu.compiler import machine_code, packs, processors, sources
from opgrad.cpu.compiler.cache import HOST, ObjectCache, directory
from opgrad.cpu.compiler.processors import PROCESSORS, Processor
from opgrad.cpu.compiler.words import CACHE_LINE

ARM = "aarch64", "arm64"  # Linux, and others
# In processes that compile for a pack: the name of the processor, the folder that gets the code, and a variable that is
# set where the code of another processor is run, too.
VARIABLE, PACKS_INTO, STANDS_IN = "OPGRAD_COMPILES_FOR", "OPGRAD_PACKS_INTO", "OPGRAD_STANDS_IN"


@functools.cache
def named() -> Processor | None:
    """The processor by whose name code is compiled or served, as for packs; None if it is the one that is here."""
    if VARIABLE in os.environ:
        return PROCESSORS[os.environ[VARIABLE]]
    served = packs.served()
    return PROCESSORS[served.processor] if served else None


def runs_here() -> bool:
    """Whether code is for the processor that is here."""
    processor = named()
    return processor is None or processors.is_here(processor)


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
    own = ("", "") if features is not None and name else _own()
    name = name or own[0]
    return name, ("" if name == "generic" else own[1]) if features is None else features


def _overrides() -> tuple[str | None, str | None]:
    return os.environ.get("NUMBA_CPU_NAME") or None, os.environ.get("NUMBA_CPU_FEATURES")


@functools.cache
def _own() -> tuple[str, str]:
    """What LLVM says of this CPU: kept with the code for it, so that llvmlite is not needed for that."""
    known = object_cache().read(HOST, "") if machine_code.HERE else None
    if known is None:
        known = "\n".join(told_by_llvm()).encode()
        if machine_code.HERE:
            object_cache().write(HOST, known, "")
    name, features = known.decode().split("\n")
    return name, features


def told_by_llvm() -> tuple[str, str]:
    """The name and the features of this CPU."""
    import llvmlite.binding as llvm

    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


def cpu_is_known() -> bool:
    """Whether `host` can answer without LLVM, or has to ask it in any case."""
    known = not machine_code.HERE or named() is not None or None not in _overrides()
    return known or object_cache().read(HOST, "") is not None


@functools.cache
def object_cache() -> Any:
    """Where object code is kept for this CPU, this compiler and this Python; before it the pack that serves kernels."""
    if PACKS_INTO in os.environ:
        folder = ObjectCache(os.environ[VARIABLE], os.environ[PACKS_INTO])
        return packs.Packing(environment(), directory(), folder)
    served = packs.served()
    compiled = ObjectCache(environment(), directory()) if not served or packs.is_compiler_installed() else None
    return packs.PackedObjects(*served, compiled) if served else compiled


def environment() -> str:
    """A digest of what code is compiled by and for."""
    # Where the fields of an array are is compiled in; it differs between builds of one version of Python.
    found = (_release("numba"), _release("llvmlite"), _kind_of_cpu(), (*packs.python(), architecture()))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:24]


def _kind_of_cpu() -> tuple[object, ...]:
    """What the code depends on: names and features that are given, else the CPU."""
    overrides = _overrides()
    if named() or not machine_code.HERE or None not in overrides:
        return host()
    return (*overrides, processors.cpu())


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
            f"opgrad: {package} is not installed, which compiles kernels, and {packs.VARIABLE} names no pack of them: "
            f"{packs.COMPILER}, or make a pack where it is installed, with `opgrad compile --for`"
        ) from None


@functools.cache
def vector_bytes() -> int:
    """The size of the host's vector registers."""
    features = host()[1].split(",")
    return 64 if "+avx512f" in features else 32 if "+avx2" in features else 16


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
