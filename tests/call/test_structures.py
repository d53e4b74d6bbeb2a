"""Structures: Python and compiled code agree on where fields lie."""

import ctypes

from opgrad.cpu.compiler import sources
from opgrad.cpu.compiler.decorators import native
from opgrad.cpu.compiler.structures import Structure, at, behind, place, several, structure
from opgrad.cpu.compiler.words import atomic_add, load_word


@structure
class Count(Structure):
    first: int
    second: int
    third: int


@native(2)
def compiled(address: int, more: int) -> int:
    """Read and write fields of two structures that lie one behind the other."""
    one, other = at(Count, address), at(Count, address, 1)
    one.first += more
    other.third = one.second - other.first
    atomic_add(place(one, "third"), 7)
    return load_word(behind(one), 1) + (other.address - one.address)


def test_python_and_compiled_code_agree():
    pair = several(Count, [Count(1, 2, 3), Count(second=50, first=40)])
    address = ctypes.addressof(pair)
    assert compiled.call(address, 10) == 50 + 24
    assert [each.words for each in pair] == [[11, 2, 10], [40, 50, -38]]
    assert behind(pair[0]) == pair[1].address == at(Count, address, 1).address
    assert place(pair[1], "second") == pair[1].address + 8


def test_a_field_is_part_of_what_code_is_made_of():
    """Code that was compiled for other fields is not found in the cache."""
    assert "('first', 'second', 'third')" in sources._annotation(Count)
