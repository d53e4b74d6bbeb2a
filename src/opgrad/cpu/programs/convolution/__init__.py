"""The gradients of convolution and of transposed convolution, as products of signals (`steps`, `signals`, `products`).

The channels of dy and x are laid out as signals, long rows of numbers in which element k of a window lies at a fixed
distance from the window. Then dx is a sum of shifted signals of dy times filters, and dw consists of dot products of
signals of one with shifted signals of the other. No matrix of windows is written. A batch is computed in chunks of
images whose signals stay in the cache. If windows are large in proportion to the images, products of matrices of
windows are faster, and take the place of signals (`windows`, `window_steps`).
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from opgrad.contract import DTYPES
from opgrad.contract.signature import Problem
from opgrad.cpu.compiler.decorators import vector_lanes
from opgrad.cpu.programs.building import ProgramSteps
from opgrad.cpu.programs.convolution.grid import SignalLayout
from opgrad.cpu.programs.convolution.steps import (
    CHUNK_BYTES,
    ConvolutionSteps,
    SignalSizes,
    SignalSteps,
    TransposedSteps,
)
from opgrad.cpu.programs.convolution.window_steps import WindowSteps, by_windows
from opgrad.cpu.programs.layout import precision
from opgrad.cpu.programs.reduction import add_sums, grouped
from opgrad.cpu.runtime.program import Program
from opgrad.ops.reference.windows import MOST_AXES, WindowAxis, convolution_axes, transposed_axes

ONE_WINDOW: Final = WindowAxis(1, 1, 1)


def conv_grad(problem: Problem) -> Program:
    return _program(problem, convolution_axes, ConvolutionSteps)


def conv_transpose_grad(problem: Problem) -> Program:
    return _program(problem, transposed_axes, TransposedSteps)


def _program(problem: Problem, axes: Any, steps: type[SignalSteps]) -> Program:
    shapes = {name: problem.specs[name].shape for name in ("dy", "x", "w")}
    wanted = [name for name in ("dx", "dw", "db") if problem.operands.get(name) is not None]
    if not all(math.prod(shape) for shape in shapes.values()):
        return _empty(problem, wanted)
    found = axes(shapes, problem.attributes)
    layout = SignalLayout((ONE_WINDOW,) * (MOST_AXES - len(found)) + found)
    sizes = _sizes(problem, shapes["w"], layout)
    if steps is ConvolutionSteps and by_windows(layout, sizes):
        return WindowSteps(problem, layout, sizes, wanted).of_all_images()
    return steps(problem, layout, sizes, wanted).of_all_images()


def _empty(problem: Problem, wanted: Sequence[str]) -> Program:
    """The program for empty sums, which are 0.

    If only x is empty, for lack of channels, the bias still has a gradient.
    """
    steps, shape = ProgramSteps(problem), problem.specs["dy"].shape
    for name in wanted:
        if name != "db" or not math.prod(shape):
            steps.clear(name)
        else:
            others = frozenset(range(len(shape))) - {1}
            add_sums(steps, grouped(shape, others), problem["dy"], problem["db"])
    return steps.program()


def _sizes(problem: Problem, filters: Sequence[int], layout: SignalLayout) -> SignalSizes:
    """The sizes. filters: the shape of w: the number of filters of all groups, and the channels of one group."""
    dtype, group = precision(problem), problem.attributes["group"]
    batch = problem.specs["x"].shape[0]
    phases, grid = len(layout.phases), math.prod(layout.grid)
    image_bytes = DTYPES[dtype].itemsize * grid * (filters[0] + group * filters[1] * phases)
    return SignalSizes(
        batch=batch,
        group=group,
        filters=filters[0] // group,
        channels=filters[1],
        taps=len(layout.taps),
        phases=phases,
        grid=grid,
        reach=layout.reach,
        images=max(1, min(batch, CHUNK_BYTES // image_bytes)),
        lanes=vector_lanes(dtype),
    )
