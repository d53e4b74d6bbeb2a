"""PyTorch front end: differentiable functions on tensors, with torch's argument names, open to torch.compile.

Imports `call` and below.

The plain functions of `opgrad` take tensors too, the gradient operators among them; these here add torch's names,
its autocast rules and the losses and lookups as torch users write them.
"""

import torch

from opgrad.call.owners import library_of
from opgrad.torch.functions import embedding, gather, leaky_relu, log_softmax, quick_gelu, relu, sigmoid, softmax, tanh
from opgrad.torch.layers import (
    dropout,
    geglu,
    gelu,
    layer_norm,
    rms_norm,
    scaled_dot_product_attention,
    sink_softmax,
    swiglu,
)
from opgrad.torch.losses.cross_entropy import (
    CrossEntropyLoss,
    LinearCrossEntropyLoss,
    cross_entropy,
    linear_cross_entropy,
    linear_log_prob,
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
)
from opgrad.torch.losses.distillation import linear_jsd, linear_kl_div
from opgrad.torch.losses.samples import CrossEntropyOutput
from opgrad.torch.patching import patch, unpatch

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyOutput",
    "LinearCrossEntropyLoss",
    "cross_entropy",
    "dropout",
    "embedding",
    "gather",
    "geglu",
    "gelu",
    "layer_norm",
    "leaky_relu",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_kl_div",
    "linear_log_prob",
    "log_softmax",
    "patch",
    "quick_gelu",
    "relu",
    "rms_norm",
    "scaled_dot_product_attention",
    "sigmoid",
    "sink_softmax",
    "softmax",
    "swiglu",
    "tanh",
    "unpatch",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]

# The plain functions learn here that tensors are PyTorch's; a compiler then need not trace how they find that out.
for kind in (torch.Tensor, torch.nn.Parameter):
    library_of(kind)
del kind
