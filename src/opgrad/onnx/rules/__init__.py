"""The gradient rules of all operators, a module for each family; importing the package declares them all.

Imports `onnx/plain`, `onnx/passes` and below.
"""

from opgrad.onnx.rules import (  # noqa: F401
    activation,
    arithmetic,
    attention,
    control_flow,
    convolution,
    coverage,
    einsum,
    experts,
    fourier,
    gated,
    grouped_attention,
    indexing,
    layout,
    linear_attention,
    loops,
    losses,
    matrix,
    microsoft,
    newer,
    normalization,
    packed,
    quantization,
    quantized_products,
    recurrent,
    reduction,
    rotary,
    sampling,
    sequences,
    softmax,
)
