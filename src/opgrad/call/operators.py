"""The operators as people call them: for each declaration in `opgrad.ops` the public function of the same name."""

from opgrad.call.public import public
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
from opgrad.ops.arithmetic import accumulate, broadcast_gradient_args, div_grad, reduce_sum_training, zero_gradient
from opgrad.ops.attention import attention, attention_grad, bias_softmax, softmax_dropout_grad
from opgrad.ops.convolution import conv_grad, conv_transpose_grad
from opgrad.ops.cross_entropy import (
    softmax_cross_entropy_loss,
    softmax_cross_entropy_loss_and_grad,
    softmax_cross_entropy_loss_grad,
    softmax_cross_entropy_loss_only,
)
from opgrad.ops.distillation import softmax_divergence_and_grad
from opgrad.ops.dropout import dropout, dropout_grad
from opgrad.ops.gated import gated_linear_unit, gated_linear_unit_grad
from opgrad.ops.gather import gather, gather_grad
from opgrad.ops.gelu import bias_fast_gelu_grad_dx, bias_gelu_grad_dx, fast_gelu, fast_gelu_grad, gelu, gelu_grad
from opgrad.ops.linear_loss import linear_cross_entropy_loss, linear_cross_entropy_loss_and_grad
from opgrad.ops.loss import (
    softmax_cross_entropy,
    softmax_cross_entropy_grad,
    sparse_softmax_cross_entropy,
    sparse_softmax_cross_entropy_grad,
)
from opgrad.ops.normalization import (
    batch_norm_internal,
    batch_normalization_grad,
    layer_normalization,
    layer_normalization_grad,
    simplified_layer_normalization,
    simplified_layer_normalization_grad,
)
from opgrad.ops.optimizer import adamw_optimizer, clip_grad_norm, sgd_optimizer
from opgrad.ops.pooling import average_pool_grad, max_pool_grad
from opgrad.ops.quantized import quantized_matmul_grad
from opgrad.ops.recurrent import gru_grad, gru_training, lstm_grad, lstm_training
from opgrad.ops.resize import resize_grad
from opgrad.ops.rotary import rotary_embedding, rotary_embedding_grad
from opgrad.ops.scatter import gather_elements, gather_elements_grad, gather_nd, gather_nd_grad, slice_grad
from opgrad.ops.several import (
    concat_training,
    is_all_finite,
    mixed_precision_scale,
    pass_through,
    reduce_all_l2,
    split_training,
)
from opgrad.ops.sink import sink_softmax, sink_softmax_grad
from opgrad.ops.softmax import log_softmax, log_softmax_grad, softmax, softmax_grad
from opgrad.ops.vocab_parallel import cross_entropy_shard, cross_entropy_shard_grad

__all__ = [
    "accumulate",
    "adamw_optimizer",
    "attention",
    "attention_grad",
    "average_pool_grad",
    "batch_norm_internal",
    "batch_normalization_grad",
    "bias_fast_gelu_grad_dx",
    "bias_gelu_grad_dx",
    "bias_softmax",
    "broadcast_gradient_args",
    "clip_grad_norm",
    "concat_training",
    "conv_grad",
    "conv_transpose_grad",
    "cross_entropy_shard",
    "cross_entropy_shard_grad",
    "div_grad",
    "dropout",
    "dropout_grad",
    "fast_gelu",
    "fast_gelu_grad",
    "gated_linear_unit",
    "gated_linear_unit_grad",
    "gather",
    "gather_elements",
    "gather_elements_grad",
    "gather_grad",
    "gather_nd",
    "gather_nd_grad",
    "gelu",
    "gelu_grad",
    "gru_grad",
    "gru_training",
    "in_place_accumulator",
    "is_all_finite",
    "layer_normalization",
    "layer_normalization_grad",
    "leaky_relu",
    "leaky_relu_grad",
    "linear_cross_entropy_loss",
    "linear_cross_entropy_loss_and_grad",
    "log_softmax",
    "log_softmax_grad",
    "lstm_grad",
    "lstm_training",
    "max_pool_grad",
    "mixed_precision_scale",
    "pass_through",
    "quantized_matmul_grad",
    "quick_gelu",
    "quick_gelu_grad",
    "reduce_all_l2",
    "reduce_sum_training",
    "relu",
    "relu_grad",
    "resize_grad",
    "rotary_embedding",
    "rotary_embedding_grad",
    "scale",
    "sgd_optimizer",
    "sigmoid",
    "sigmoid_grad",
    "simplified_layer_normalization",
    "simplified_layer_normalization_grad",
    "sink_softmax",
    "sink_softmax_grad",
    "slice_grad",
    "softmax",
    "softmax_cross_entropy",
    "softmax_cross_entropy_grad",
    "softmax_cross_entropy_loss",
    "softmax_cross_entropy_loss_and_grad",
    "softmax_cross_entropy_loss_grad",
    "softmax_cross_entropy_loss_only",
    "softmax_divergence_and_grad",
    "softmax_dropout_grad",
    "softmax_grad",
    "sparse_softmax_cross_entropy",
    "sparse_softmax_cross_entropy_grad",
    "split_training",
    "tanh",
    "tanh_grad",
    "zero_gradient",
]

# In place of the references, which have the same signatures.
globals().update({name: public(globals()[name]) for name in __all__})
