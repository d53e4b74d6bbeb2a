"""Object files linked without LLVM, and what the CPU says of itself."""

import struct

import pytest
from subprocesses import run_python

from opgrad.cpu.compiler import decorators, machine_code, sources, target, words
from opgrad.cpu.runtime import threads
from opgrad.cpu.runtime.plan import execute

pytestmark = pytest.mark.skipif(not machine_code.HERE, reason="LLVM links and tells here")

WARM = """
import sys
import numpy as np, opgrad
x = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
assert np.allclose(opgrad.softmax(x).sum(1), 1)
print([name for name in ("numba", "llvmlite") if name in sys.modules])
"""


def code_of(function):
    function.link()
    return decorators.object_cache().read(sources.object_name(function.function, function.interface))


def test_a_warm_process_does_without_llvm():
    run_python(WARM)
    assert run_python(WARM) == "[]"


def test_both_links_run_alike():
    """`run` without a team calls every part here: once as linked by LLVM, once without it."""
    import ctypes

    code, seen = code_of(threads.run), []
    task = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(lambda given, part: seen.append(part) or 0)
    for address in (machine_code.link(code, decorators.EXPORTED), decorators._load_with_llvm(code)):
        call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(address)
        assert call(0, ctypes.cast(task, ctypes.c_void_p).value, 0, 3) == 0
    assert seen == [0, 1, 2] * 2


@decorators.native(1)
def second_word(index: int) -> int:
    return words.load_word(words.named_address("opgrad_of_a_test"), index)


def test_addresses_by_name():
    """Both links find what the process has given a name; code from the cache finds what this process has given it."""
    import ctypes

    words = (ctypes.c_int64 * 2)(5, 6)
    machine_code.give_name("opgrad_of_a_test", ctypes.addressof(words))
    code = code_of(second_word)
    for address in (machine_code.link(code, decorators.EXPORTED), decorators._load_with_llvm(code)):
        assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(1) == 6


# Where addresses are taken but for single pages, 3 GiB from each other; what else is mapped comes below them. LLVM
# makes a section's memory out of whole pages.
SCATTERED = """
import ctypes, mmap
from opgrad.cpu.compiler import decorators, machine_code, sources, words

@decorators.native(1)
def second_word(index):
    return words.load_word(words.named_address("opgrad_of_a_test"), index)

two = (ctypes.c_int64 * 2)(5, 6)
machine_code.give_name("opgrad_of_a_test", ctypes.addressof(two))
second_word.link()
code = decorators.object_cache().read(sources.object_name(second_word.function, second_word.interface))
decorators._load_with_llvm(code)
reserve = lambda size: machine_code._system().mmap(0, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
taken = reserve(16 << 30)
for size in (1 << 24, 1 << 20, 1 << 16, mmap.PAGESIZE):
    while reserve(size) > taken:
        pass
for page in range(1, 16, 3):
    machine_code.free_memory(taken + (page << 30), mmap.PAGESIZE)
address = decorators._load_with_llvm(code)
print(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(1))
"""


def test_llvm_links_where_free_memory_is_scattered():
    """Sections of a file that lie more than 2 GiB apart ended the process."""
    assert run_python(SCATTERED) == "6"


def test_other_relocations_are_left_to_llvm(monkeypatch):
    """Pages that were taken for such a file are given back."""
    code, taken, freed = bytearray(code_of(second_word)), [], []
    new_memory, free_memory = machine_code.new_memory, machine_code.free_memory
    monkeypatch.setattr(machine_code, "new_memory", lambda size: taken.append((new_memory(size), size)) or taken[-1][0])
    monkeypatch.setattr(machine_code, "free_memory", lambda *pages: freed.append(pages) or free_memory(*pages))
    file = machine_code._ObjectFile(bytes(code))
    tables = [each for each in file._sections if each.kind == machine_code.RELOCATIONS and each.info in file._places]
    assert tables
    for table in tables:
        (number,) = struct.unpack_from("<Q", code, table.offset + 8)
        struct.pack_into("<Q", code, table.offset + 8, number >> 32 << 32 | 3)
    assert machine_code.link(bytes(code), decorators.EXPORTED) is None
    assert freed == taken != []


def test_object_files_of_other_systems_are_left_to_llvm():
    assert machine_code.link(b"\xcf\xfa\xed\xfe" + code_of(execute)[4:], decorators.EXPORTED) is None


def test_functions_far_away_are_called_by_a_jump():
    near, far, jump = 1 << 20, 1 << 40, 1 << 10
    assert machine_code.distance(machine_code.CALL, near, jump) == near
    assert machine_code.distance(machine_code.CALL, -far, jump) == jump
    assert machine_code.distance(machine_code.PLACES_OF_ADDRESSES[0], near, jump) == jump + len(machine_code.JUMP)
    with pytest.raises(machine_code.UnforeseenError):
        machine_code.distance(machine_code.DISTANCE, far, jump)


def test_the_cpu_is_the_same_every_time(monkeypatch):
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):  # which hold it down
        monkeypatch.delenv(name, raising=False)
    assert target.cpu.__wrapped__() == target.cpu()
    assert target.host() == target.told_by_llvm.__wrapped__()
    features = target.host()[1].split(",")
    told = next((size for size, each in target.WIDE.items() if each.features in features), 16)
    assert target.vector_bytes.__wrapped__() == told


def test_words_on_the_stack_are_not_filled():
    """Filling the 9,000 words of a node's key took LLVM nine seconds to compile, and each call a microsecond."""
    from opgrad.onnxruntime import compute

    assert b"memset" not in code_of(compute.compute)
