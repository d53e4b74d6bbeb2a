"""What inference, passes and selection know of an operator beyond ONNX's schema: one row for each operator.

An operator of another domain than ai.onnx that gets a gradient rule gets a row here, or a stand-in in `inference.py`
that writes its shape.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import TensorProto

from opgrad.onnx.graph.messages import CLASSICAL, MICROSOFT, domain_of, names_of


@dataclass(frozen=True)
class Facts:
    """What is known of an operator.

    weights: the indices of inputs that may be weights.
    stored, bias: the index of the weight of a product or of a table of rows, and that of what a product adds.
    like: from the index of a result to that of the input with its dtype and shape.
    becomes: the operator of ai.onnx that has equal shapes, and takes the first inputs and the attributes that it knows.
    dtype: of all results. dtype_of: the index of the input with the dtype of the results. See `dtype_of_result`.
    results_are_optional: each of its results may be left out.
    moves: it returns its first input, or parts of it, in another shape, order, size or dtype, rounded, or limited.
    same_rank: its first result has the rank of its first input.
    quantized: it computes with quantized integers.
    byte_products: its products of bytes: the indices of the other operand, None where the node makes it, of the weight
    and of the weight's zero point.
    writes: from the index of a result to that of the input over which it is written.
    once: it draws random numbers or keeps state, so that equal nodes are not shared, and none is computed again.
    """

    weights: Collection[int] = ()
    stored: int | None = None
    bias: int | None = None
    like: Mapping[int, int] = field(default_factory=dict)
    becomes: str = ""
    dtype: int | None = None
    dtype_of: int | None = None
    results_are_optional: bool = False
    moves: bool = False
    same_rank: bool = False
    quantized: bool = False
    byte_products: Sequence[tuple[int | None, int, int]] = ()
    writes: Mapping[int, int] = field(default_factory=dict)
    once: bool = False


UNKNOWN = Facts()
ALL = range(64)
SCALE_AND_BIAS = Facts(weights=(1, 2))
AS_INPUT = Facts(like={0: 0})
NBITS = {"N": 0, "K": 0, "block_size": 32, "bits": 4}  # attributes of MatMulNBits with their defaults
STATISTICS = {0: 0, 1: 3, 2: 4, 3: 3, 4: 4}  # results of a batch normalization that trains


def _all(names: str, facts: Facts) -> dict[str, Facts]:
    return dict.fromkeys(names_of(names), facts)


# fmt: off
_ONNX = {
    **_all("Einsum Concat", Facts(weights=ALL)),
    "MatMul": Facts(weights=ALL, stored=1),
    "Gemm": Facts(weights=ALL, stored=1, bias=2),
    "Conv": Facts(weights=(1, 2), stored=1, bias=2),
    **_all("ConvTranspose PRelu", SCALE_AND_BIAS),
    **_all("BatchNormalization InstanceNormalization LayerNormalization", Facts(weights=(1, 2), same_rank=True)),
    "GroupNormalization": Facts(weights=(1, 2), like={0: 0}, same_rank=True),
    "RMSNormalization": Facts(weights=(1,), same_rank=True),
    "SimplifiedLayerNormalization": Facts(weights=(1,), like={0: 0}),  # onnxruntime's, in this domain
    **_all("LSTM GRU RNN", Facts(weights=(1, 2, 3, 7))),
    "Gather": Facts(weights=(0,), stored=0),
    **_all("GatherElements GatherND ConcatFromSequence", Facts(weights=(0,))),
    **_all("""CastLike Reshape Unsqueeze Squeeze Flatten Expand CenterCropPad Trilu Compress ReverseSequence
        DepthToSpace SpaceToDepth Resize Upsample QuantizeLinear Min Max""",
        Facts(moves=True)),
    **_all("""Identity Cast Transpose Slice Tile Pad Clip""",
        Facts(moves=True, same_rank=True)),
    **_all("""Abs Celu Elu Erf Exp Gelu HardSigmoid HardSwish LRN LeakyRelu Log LogSoftmax Mish Neg Not Reciprocal
        Relu Selu Sigmoid Softmax Softplus Softsign Split Sqrt Swish Tanh ThresholdedRelu""",
        Facts(same_rank=True)),
    "DequantizeLinear": Facts(moves=True, quantized=True),
    **_all("MatMulInteger", Facts(quantized=True, byte_products=[(0, 1, 3)])),
    "ConvInteger": Facts(quantized=True),
    **_all("QLinearMatMul QLinearConv", Facts(quantized=True, byte_products=[(0, 3, 5)])),
    **_all("""RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial""",
        Facts(once=True)),
    "Dropout": Facts(same_rank=True, once=True),
}
_MICROSOFT = {
    # products
    "FusedMatMul": Facts(weights=ALL, stored=1),
    "FusedGemm": Facts(becomes="Gemm"),
    "FusedConv": Facts(weights=(1, 2), becomes="Conv"),
    "MatMulNBits": Facts(stored=1, bias=5, quantized=True),
    "MatMulInteger16": Facts(becomes="MatMulInteger"),
    "MatMulIntegerToFloat": Facts(quantized=True, byte_products=[(0, 1, 5)]),
    "DynamicQuantizeMatMul": Facts(quantized=True, byte_products=[(None, 1, 3)]),
    "DynamicQuantizeLSTM": Facts(byte_products=[(None, 1, 9), (None, 2, 11)]),
    "QGemm": Facts(quantized=True, byte_products=[(0, 3, 5)]),
    "QAttention": Facts(quantized=True, byte_products=[(0, 1, 7)]),
    # tables
    "GatherBlockQuantized": Facts(stored=0, quantized=True),
    "EmbedLayerNormalization": Facts(weights=(2, 3, 4, 5, 6)),
    "QEmbedLayerNormalization": Facts(quantized=True),
    # element by element, normalization
    **_all("""Gelu QuickGelu FakeQuant Inverse Trilu RotaryEmbedding RotaryEmbeddingTraining
        MRotaryEmbedding MoE QMoE QLinearLeakyRelu QLinearSigmoid QLinearSoftmax ScaledSiLU GatedAdd GatedRMSNorm
        CausalConvWithState StopGradient""", AS_INPUT),
    **_all("BiasGelu FastGelu BiasSoftmax", Facts(weights=(1, 2), like={0: 0})),
    **_all("BiasDropout BitmaskBiasDropout BitmaskDropout", Facts(like={0: 0}, once=True)),
    "PassThrough": Facts(once=True),
    "BatchNormInternal": Facts(weights=(1, 2), like=STATISTICS, writes={1: 3, 2: 4}, once=True),
    "BatchNormTraining": Facts(like=STATISTICS),
    "SkipLayerNormalization": Facts(weights=(2, 3, 4), like={0: 0, 3: 0}),
    "SkipSimplifiedLayerNormalization": Facts(weights=(2, 3), like={0: 0, 3: 0}),
    "LinearAttentionGate": Facts(like={0: 0, 1: 3}),
    # attention, layers
    "Attention": SCALE_AND_BIAS,
    "MultiHeadAttention": Facts(weights=(3,)),
    "GRUTraining": Facts(becomes="GRU"),
    "LSTMTraining": Facts(becomes="LSTM"),
    # operators of ai.onnx in this domain
    **{op: Facts(becomes=op) for op in ("GatherND", "QuantizeLinear", "Range", "Pad", "Unique")},
    "DequantizeLinear": Facts(becomes="DequantizeLinear", quantized=True),
    "ConcatTraining": Facts(becomes="Concat"),
    # losses, gradients, optimizers
    "SoftmaxCrossEntropyLossInternal": Facts(becomes="SoftmaxCrossEntropyLoss"),
    "SoftmaxCrossEntropyLossInternalGrad": Facts(dtype_of=1),
    **_all("GatherGrad GatherNDGrad", Facts(dtype_of=2)),
    "BroadcastGradientArgs": Facts(dtype=TensorProto.INT64, results_are_optional=True),
    # Gradients of normalizations have no optional results: onnxruntime-training 1.19.2 demands all of them.
    **_all("AttentionGrad ConvGrad ConvTransposeGrad DivGrad GRUGrad LSTMGrad", Facts(results_are_optional=True)),
    "InPlaceAccumulatorV2": Facts(writes={1: 0}, once=True),
    "InPlaceAccumulator": Facts(writes={0: 0}, once=True),
    "SGDOptimizerV2": Facts(writes={1: 1}, once=True),
    "AdamWOptimizer": Facts(writes={1: 2, 2: 4, 3: 5}, once=True),
}
_CLASSICAL = {"Imputer": AS_INPUT}
# fmt: on
FACTS: Mapping[tuple[str, str], Facts] = {
    (domain, op): facts
    for domain, rows in (("", _ONNX), (MICROSOFT, _MICROSOFT), (CLASSICAL, _CLASSICAL))
    for op, facts in rows.items()
}


def facts_of(node: onnx.NodeProto) -> Facts:
    """What is known of a node's operator; nothing of one without a row."""
    return FACTS.get((domain_of(node), node.op_type), UNKNOWN)


@functools.cache
def dtype_of_result(domain: str, op: str, opset: int, index: int) -> tuple[int | None, int]:
    """The dtype of a result of an operator, None if it depends on the node, and the index of the input that has it.

    opset: of ai.onnx, whose schemas tell both.
    """
    known = FACTS.get((domain, op), UNKNOWN)
    if known.dtype is not None or known.dtype_of is not None:
        return known.dtype, known.dtype_of or 0
    if domain or not onnx.defs.has(op, opset):
        return None, 0
    schema: Any = onnx.defs.get_schema(op, opset)  # onnx's type stubs lack the members read below
    name = schema.outputs[min(index, len(schema.outputs) - 1)].type_str
    allowed = next((each.allowed_type_strs for each in schema.type_constraints if each.type_param_str == name), [name])
    if len(allowed) == 1 and allowed[0].startswith("tensor("):
        return TensorProto.DataType.Value(allowed[0][len("tensor(") : -1].upper()), 0
    return None, next((place for place, each in enumerate(schema.inputs) if each.type_str == name), 0)
