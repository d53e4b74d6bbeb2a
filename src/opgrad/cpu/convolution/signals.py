"""Images as signals: every channel of a batch as one row of numbers in which a window's elements lie at fixed shifts.

A channel's signal has, one image after the other, a grid of elements; what has no source is 0. With a stride s, the
elements u = s * q + r of an axis make s signals, one for each r, so that elements of neighbouring windows always
stand side by side.
"""

from typing import Any, Final

from opgrad.cpu.compiler.memory import load_word
from opgrad.cpu.compiler.native import inline, kernel
from opgrad.cpu.compiler.simd import (
    Pointer,
    first,
    full,
    lanes,
    load,
    load_masked,
    load_one,
    store,
    store_masked,
    store_one,
)

# Words of a phase r: for each of three axes the first q that has a source, the one behind the last, the first's source.
PHASE: Final = 9


@inline
def clear(x: Any, n: int) -> None:
    w, i = lanes(x), 0
    while i + w <= n:
        store(x, i, full(x, 0.0))
        i += w
    if i < n:
        store_masked(x, i, full(x, 0.0), first(x, n - i))


@inline
def copy(y: Any, x: Any, n: int) -> None:
    w, i = lanes(x), 0
    while i + w <= n:
        store(y, i, load(x, i))
        i += w
    if i < n:
        mask = first(x, n - i)
        store_masked(y, i, load_masked(x, i, mask, 0.0), mask)


@kernel
def lay_out(
    part, per_part, units, phases, phase_table, images, first_image, channels,
    depth, height, width, step_d, step_h, step_w, grid_h, grid_w, grid, front, pitch, filled,
    x: Pointer, signals: Pointer,
):  # fmt: skip
    """signals = each channel's images (a unit with each phase), zeros around them and, unless filled, between."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        channel, phase = unit // phases, phase_table + 8 * PHASE * (unit % phases)
        signal = signals + unit * pitch
        if filled:
            clear(signal, front)
            clear(signal + (front + images * grid), pitch - front - images * grid)
        else:
            clear(signal, pitch)
        low_w = load_word(phase, 6)
        count = load_word(phase, 7) - low_w
        if count > 0:
            for image in range(images):
                for qd in range(load_word(phase, 0), load_word(phase, 1)):
                    for qh in range(load_word(phase, 3), load_word(phase, 4)):
                        d = load_word(phase, 2) + (qd - load_word(phase, 0)) * step_d
                        h = load_word(phase, 5) + (qh - load_word(phase, 3)) * step_h
                        row = (((first_image + image) * channels + channel) * depth + d) * height + h
                        source = x + (row * width + load_word(phase, 8))
                        to = signal + (front + image * grid + (qd * grid_h + qh) * grid_w + low_w)
                        if step_w == 1:
                            copy(to, source, count)
                        else:
                            for q in range(count):
                                store_one(to, q, load_one(source, q * step_w))


@kernel
def take_back(
    part, per_part, units, phases, phase_table, images, first_image, channels,
    depth, height, width, step_d, step_h, step_w, grid_h, grid_w, grid, front, pitch, covered,
    signals: Pointer, x: Pointer,
):  # fmt: skip
    """x = the elements of the signals that have a source there, 0 elsewhere; a unit is a channel of one image."""
    for unit in range(part * per_part, min((part + 1) * per_part, units)):
        image, channel = unit // channels, unit % channels
        plane = ((first_image + image) * channels + channel) * depth
        if not covered:
            clear(x + plane * height * width, depth * height * width)
        for p in range(phases):
            phase = phase_table + 8 * PHASE * p
            low_w = load_word(phase, 6)
            count = load_word(phase, 7) - low_w
            signal = signals + ((channel * phases + p) * pitch + front + image * grid + low_w)
            if count > 0:
                for qd in range(load_word(phase, 0), load_word(phase, 1)):
                    for qh in range(load_word(phase, 3), load_word(phase, 4)):
                        d = load_word(phase, 2) + (qd - load_word(phase, 0)) * step_d
                        h = load_word(phase, 5) + (qh - load_word(phase, 3)) * step_h
                        to = x + (((plane + d) * height + h) * width + load_word(phase, 8))
                        source = signal + (qd * grid_h + qh) * grid_w
                        if step_w == 1:
                            copy(to, source, count)
                        else:
                            for q in range(count):
                                store_one(to, q * step_w, load_one(source, q))
