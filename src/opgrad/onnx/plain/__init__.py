"""Training operators in plain ONNX, a module for each family; importing the package declares them all.

Imports `onnx/graph`, `ops` and below.
"""

from opgrad.onnx.plain import (  # noqa: F401
    activation,
    attention,
    convolution,
    cross_entropy,
    gather,
    normalization,
    optimizer,
    quantized,
    recurrent,
)
from opgrad.onnx.plain.lowering import FORMS, NOT_LOWERED, lower  # noqa: F401

LOWERED = tuple(sorted(name for _, name in FORMS))
