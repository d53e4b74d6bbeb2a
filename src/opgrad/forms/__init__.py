"""Training operators written with plain ONNX operators, a module for each family; `FORMS` has them all."""

from opgrad.forms import (
    accumulate,
    activation,
    contrib,
    convolution,
    cross_entropy,
    dropout,
    gather,
    joins,
    mixed_precision,
    normalization,
    optimizer,
    pooling,
    recurrent,
    resize,
    softmax,
)
from opgrad.forms.registry import FORMS, Call, Form, NoForm

__all__ = [
    "FORMS",
    "Call",
    "Form",
    "NoForm",
    "accumulate",
    "activation",
    "contrib",
    "convolution",
    "cross_entropy",
    "dropout",
    "gather",
    "joins",
    "mixed_precision",
    "normalization",
    "optimizer",
    "pooling",
    "recurrent",
    "resize",
    "softmax",
]
