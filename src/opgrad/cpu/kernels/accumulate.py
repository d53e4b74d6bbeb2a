"""Sums, copies and scaled copies of arrays, element by element."""

from opgrad.cpu.kernels.loops.elements import elementwise, scaling
from opgrad.cpu.kernels.loops.map import times

SUM, VALUE = elementwise(lambda buffer, value, alpha: buffer + value), elementwise(lambda value, alpha: value)
TIMES, DIVIDED = scaling(times), scaling(lambda x, factor: x / factor)
