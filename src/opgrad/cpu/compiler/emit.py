"""Compiles a Python function to machine code for this CPU with Numba and LLVM, which are imported at the first use."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from opgrad.cpu.compiler import machine_code
from opgrad.cpu.compiler.target import host

EXPORTED = "opgrad_entry"  # the one exported symbol of an object file


def object_code(function: Callable[..., Any], interface: str, symbol: str) -> bytes:
    """The object file of a function compiled for the given interface.

    `symbol` names the module for people who read its code.
    """
    module = _module(function, interface)
    module.name = symbol
    return bytes(machine().emit_object(module))


def assembly(function: Callable[..., Any], dtypes: Iterable[str], interface: str = "task") -> str:
    """The assembly text of a kernel's function for pointers of these dtypes, for an interface of `Kernel.task`."""
    return str(machine().emit_assembly(_module(function, f"{interface}({','.join(dtypes)})")))


def _module(function: Callable[..., Any], interface: str) -> Any:
    from opgrad.cpu.compiler import lowering

    return lowering.build(function, interface, EXPORTED, machine())


@functools.cache
def machine() -> Any:
    """LLVM's target machine for this CPU, at optimisation level 3."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    name, features = host()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=name, features=features, opt=3, **code_model(machine_code.HERE)
    )


def code_model(near: bool) -> dict[str, Any]:
    """Options of a target machine: whether code finds its constants by distances, which fit into instructions.

    Otherwise LLVM, which links code for itself, takes addresses of 64 bits: an instruction and a register for each.
    """
    return {"reloc": "pic", "codemodel": "small"} if near else {"jit": True}
