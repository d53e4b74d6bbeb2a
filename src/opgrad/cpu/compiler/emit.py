"""Compiles a Python function to machine code with Numba and LLVM, which are imported at the first use."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from opgrad.cpu.compiler import machine_code, target
from opgrad.cpu.compiler.target import host, told_by_llvm

EXPORTED = "opgrad_entry"  # the one exported symbol of an object file
# The instruction of a waiting loop on arm64, which a stand-in on another processor does without.
ELSEWHERE = "call void @llvm.aarch64.hint(i32 1)"


def object_code(function: Callable[..., Any], interface: str, symbol: str) -> bytes:
    """The object file of a function compiled for the given interface.

    `symbol` names the module for people who read its code.
    """
    return _code(_lowered(function, interface), symbol, machine())


def stand_in(function: Callable[..., Any], interface: str, symbol: str) -> bytes:
    """The object file that computes here what that of `object_code` will on another processor.

    The vectors of both have as many elements.
    """
    return _code(str(_lowered(function, interface)).replace(ELSEWHERE, ""), symbol, own_machine())


def _lowered(function: Callable[..., Any], interface: str) -> Any:
    from opgrad.cpu.compiler import lowering

    return lowering.build(function, interface, EXPORTED)


def _code(lowered: Any, symbol: str, machine: Any) -> bytes:
    from opgrad.cpu.compiler import lowering

    module = lowering.optimised(lowered, EXPORTED, machine)
    module.name = symbol
    return bytes(machine.emit_object(module))


def assembly(function: Callable[..., Any], dtypes: Iterable[str], interface: str = "task") -> str:
    """The assembly text of a kernel's function for pointers of these dtypes, for an interface of `Kernel.task`."""
    from opgrad.cpu.compiler import lowering

    lowered = _lowered(function, f"{interface}({','.join(dtypes)})")
    return str(machine().emit_assembly(lowering.optimised(lowered, EXPORTED, machine())))


@functools.cache
def machine() -> Any:
    """LLVM's target machine for the processor that code is for, at optimisation level 3."""
    import llvmlite.binding as llvm

    processor = target.named()
    if processor is None:
        return _machine(llvm.get_process_triple(), *host(), machine_code.HERE)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return _machine(processor.triple, processor.cpu, processor.features, True)


@functools.cache
def own_machine() -> Any:
    """LLVM's target machine for the processor that is here."""
    import llvmlite.binding as llvm

    return _machine(llvm.get_process_triple(), *told_by_llvm(), machine_code.HERE)


def _machine(triple: str, cpu: str, features: str, near: bool) -> Any:
    """A target machine.

    near: whether its code finds constants by distances, which fit into instructions. Otherwise LLVM, which links code
    for itself, takes addresses of 64 bits: an instruction and a register for each.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    model = {"reloc": "pic", "codemodel": "small"} if near else {"jit": True}
    return llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3, **model)
