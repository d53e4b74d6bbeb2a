"""Tuples of indices become numbers of slices."""

from opgrad.cpu.compiler import simd as v
from opgrad.cpu.compiler.memory import load_word, store_word
from opgrad.cpu.compiler.native import kernel
from opgrad.cpu.compiler.parameters import Part, Pointer, Units


@kernel
def number_tuples(tuples: Units, part: Part, per_batch, named, sizes, indices: Pointer, numbers, found):
    """numbers[j] = the number of the slice that tuple j names; found[part] = the first wrong index, or -1."""
    wrong, batch, left = -1, tuples.start // per_batch, per_batch - tuples.start % per_batch
    for j in tuples:
        number = batch
        for k in range(named):
            size, index = load_word(sizes, k), v.load_one(indices, j * named + k)
            place = index + size if index < 0 else index
            if (place < 0 or place >= size) and wrong < 0:
                wrong = j * named + k
            number = number * size + place
        store_word(numbers, j, number)
        left -= 1
        if not left:  # counting on: a division for each took a third of the time
            batch, left = batch + 1, per_batch
    store_word(found, part, wrong)
