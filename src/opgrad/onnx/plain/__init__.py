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
from opgrad.onnx.plain.lowering import FORMS
from opgrad.onnx.plain.lowering import NOT_LOWERED as NOT_LOWERED
from opgrad.onnx.plain.lowering import lower as lower

LOWERED = tuple(sorted(name for _, name in FORMS))
