"""Object files that LLVM writes for macOS and Windows, as their systems' compilers would, read by another library.

What LLVM's loader has to do there: the names that kernels leave open, and the kinds of relocations.
"""

import pytest

from opgrad.cpu.compiler import machine_code

lief = pytest.importorskip("lief")

# A kernel in small: a constant that lies outside the code, and a function of the C library.
MODULE = """
target triple = "{triple}"
@constants = internal constant [4 x double] [double 1.5, double 2.5, double 3.5, double 4.5], align 64
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
define i64 @entry(ptr %p, i64 %i, i64 %n) {{
  call void @llvm.memset.p0.i64(ptr %p, i8 0, i64 %n, i1 false)
  %at = getelementptr [4 x double], ptr @constants, i64 0, i64 %i
  %value = load double, ptr %at
  store double %value, ptr %p
  ret i64 0
}}
"""
# The entry's name there, and what filling with zeros calls: macOS has functions of its own for it.
SYSTEMS = {
    "arm64-apple-macosx14.0": {"_entry", "_bzero"},
    "x86_64-apple-macosx14.0": {"_entry", "___bzero"},
    "x86_64-pc-windows-msvc": {"entry", "memset"},
}


def object_file(triple):
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(MODULE.format(triple=triple))
    target = llvm.Target.from_triple(triple).create_target_machine(reloc="default", codemodel="jitdefault", jit=True)
    return target.emit_object(module)


@pytest.mark.parametrize("triple", SYSTEMS)
def test_object_files_of_other_systems(triple):
    code = object_file(triple)
    read = lief.parse(list(code))
    assert isinstance(read, lief.COFF.Binary if "windows" in triple else lief.MachO.Binary)
    assert SYSTEMS[triple] <= {symbol.name for symbol in read.symbols}
    assert list(read.relocations)
    assert machine_code.link(code, "entry") is None, "left to LLVM"
