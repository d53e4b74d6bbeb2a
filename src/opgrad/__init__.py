"""Training kernels for NumPy arrays and, under their original names, for stock onnxruntime."""

from opgrad import post_ops
from opgrad.cpu.parallel import get_num_threads, set_num_threads
from opgrad.dropout import Dropout
from opgrad.ops.accumulate import in_place_accumulator, scale
from opgrad.ops.activation import (
    leaky_relu,
    leaky_relu_grad,
    quick_gelu,
    quick_gelu_grad,
    relu,
    relu_grad,
    sigmoid,
    sigmoid_grad,
    tanh,
    tanh_grad,
)
from opgrad.ops.convolution import conv_grad
from opgrad.ops.cross_entropy import (
    softmax_cross_entropy_loss,
    softmax_cross_entropy_loss_and_grad,
    softmax_cross_entropy_loss_grad,
    softmax_cross_entropy_loss_only,
)
from opgrad.ops.gather import gather, gather_grad
from opgrad.ops.pooling import average_pool_grad, max_pool_grad
from opgrad.ops.several import (
    concat_training,
    is_all_finite,
    mixed_precision_scale,
    pass_through,
    reduce_all_l2,
    split_training,
)
from opgrad.ops.softmax import log_softmax, log_softmax_grad, softmax, softmax_grad
from opgrad.planned import (
    PlannedCall,
    log_softmax_grad_plan,
    log_softmax_plan,
    plan,
    softmax_grad_plan,
    softmax_plan,
)

__version__ = "0.1.0"

__all__ = [
    "Dropout",
    "PlannedCall",
    "average_pool_grad",
    "concat_training",
    "conv_grad",
    "gather",
    "gather_grad",
    "get_num_threads",
    "in_place_accumulator",
    "is_all_finite",
    "leaky_relu",
    "leaky_relu_grad",
    "log_softmax",
    "log_softmax_grad",
    "log_softmax_grad_plan",
    "log_softmax_plan",
    "max_pool_grad",
    "mixed_precision_scale",
    "pass_through",
    "plan",
    "post_ops",
    "quick_gelu",
    "quick_gelu_grad",
    "reduce_all_l2",
    "relu",
    "relu_grad",
    "scale",
    "set_num_threads",
    "sigmoid",
    "sigmoid_grad",
    "softmax",
    "softmax_cross_entropy_loss",
    "softmax_cross_entropy_loss_and_grad",
    "softmax_cross_entropy_loss_grad",
    "softmax_cross_entropy_loss_only",
    "softmax_grad",
    "softmax_grad_plan",
    "softmax_plan",
    "split_training",
    "tanh",
    "tanh_grad",
]
