"""The gradient rules of all operators, a module for each family."""

from opgrad.rules import (
    activation,
    arithmetic,
    attention,
    convolution,
    einsum,
    elementary,
    extrema,
    indexing,
    layout,
    losses,
    matrix,
    microsoft,
    normalization,
    pooling,
    quantization,
    recurrent,
    reduction,
    resize,
    sampling,
    scatter,
    softmax,
    zero,
)

FAMILIES = (
    *(elementary, arithmetic, extrema, activation, reduction, matrix, einsum, softmax, losses, normalization),
    *(convolution, pooling, layout, indexing, scatter, resize, sampling, recurrent, attention, microsoft),
    *(quantization, zero),
)
