"""The gradient rules of all operators, a module for each family."""

from opgrad.gradients.rules import (
    activation,
    arithmetic,
    convolution,
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
    *(elementary, arithmetic, extrema, activation, reduction, matrix, softmax, losses, normalization, convolution),
    *(pooling, layout, indexing, scatter, resize, sampling, recurrent, microsoft, quantization, zero),
)
