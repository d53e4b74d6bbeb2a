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
    layout,
    matrix,
    microsoft,
    normalization,
    quantization,
    recurrent,
    sampling,
)
