"""What the rules are checked with: operators in the forms of several opsets, on small arrays.

The table in docs/reference/gradients.md is made of these, too.
"""

import re
from dataclasses import replace

import gradient_cases_attention
import gradient_cases_layers
import numpy as np
from gradient_case import CASES, MICROSOFT, NEWEST, add, ints, numbers
from onnx import TensorProto

__all__ = [
    "CASES",
    "ELSEWHERE",
    "NEWEST",
    "REFERENCE_FROM",
    "gradient_cases_attention",
    "gradient_cases_layers",
    "numbers",
]

SMALL, POSITIVE, UNIT = numbers(2, 3), numbers(2, 3, low=0.3), numbers(2, 3, low=-0.9, high=0.9)

# --- one value ---
for op in ("Neg", "Abs", "Exp", "Tanh", "Sigmoid", "Relu", "Softplus", "Softsign", "Elu", "Selu", "HardSigmoid"):
    add(op, (7, 11, 13, 22), SMALL)
for op in ("Sin", "Cos", "Tan", "Atan", "Identity", "LeakyRelu"):
    add(op, (7, 13, 22), SMALL)
for op in ("Sinh", "Cosh", "Asinh"):
    add(op, (9, 22), SMALL)
for op in ("Sqrt", "Log", "Reciprocal"):
    add(op, (7, 13, 22), POSITIVE)
for op in ("Asin", "Acos"):
    add(op, (7, 22), UNIT)
add("Atanh", (9, 22), UNIT)
add("Acosh", (9, 22), numbers(2, 3, low=1.2, high=4))
add("Erf", (9, 13), SMALL)
add("LeakyRelu", 16, SMALL, alpha=-0.3, form="negative alpha")
add("Elu", 22, SMALL, alpha=0.7, form="alpha")
add("Selu", 22, SMALL, alpha=1.3, gamma=0.8, form="alpha and gamma")
add("HardSigmoid", 22, numbers(3, 4, low=-5, high=5), alpha=0.3, beta=0.4, form="alpha and beta")
add("HardSwish", (14, 22), numbers(3, 4, low=-5, high=5))
add("Celu", (12, 22), SMALL, alpha=0.6)
add("Mish", (18, 22), SMALL)
add("Swish", 24, SMALL, alpha=1.4)
add("ThresholdedRelu", (10, 22), SMALL, alpha=0.5)
add("Shrink", 9, SMALL, lambd=0.6, bias=0.2)
add("Gelu", 20, SMALL)
add("Gelu", 20, SMALL, approximate="tanh", form="tanh")
add("PRelu", (7, 9, 16), SMALL, numbers(3, seed=1))
add("Cast", (9, 13, 21), SMALL, to=TensorProto.DOUBLE)
add("CastLike", 15, SMALL, SMALL, wanted=(0,))

# --- several values ---
for op in ("Add", "Sub", "Mul", "Div"):
    add(op, (7, 13, 14), SMALL, numbers(2, 3, low=0.5, seed=1))
    add(op, (7, 14), numbers(2, 1, 4), numbers(3, 1, low=0.5), form="broadcast")
    add(op, 14, numbers(3), numbers(2, 3, low=0.5), form="broadcast first")
add("Div", 14, SMALL, numbers(3, low=0.5), form="constant divisor", wanted=(0,))
add("Pow", (7, 12, 15), POSITIVE, numbers(3, low=0.5))
add("Pow", 15, SMALL, np.array(2.0), form="square", wanted=(0,))
add("Pow", 15, SMALL, np.array(3, np.int64), form="whole exponent")
for op in ("Sum", "Mean", "Max", "Min"):
    add(op, (8, 13), SMALL, numbers(3, seed=1), numbers(2, 1, seed=2), form="three, broadcast")
add("Mod", 13, numbers(2, 3, low=0.3, high=7), numbers(3, low=0.7), fmod=1)
add("Where", (9, 16), np.array([[True], [False]]), SMALL, numbers(3), form="broadcast")
add("Expand", (8, 13), numbers(3, 1), ints(2, 3, 4))
add("Clip", (11, 12, 13), SMALL, np.array(-1.0), np.array(1.2), form="bounds as inputs")
add("Clip", 13, SMALL, None, np.array(1.2), form="upper bound alone", wanted=(0,))
add("Clip", (7, 10), SMALL, min=-1.0, max=1.25, form="bounds as attributes")
add("Clip", 7, SMALL, max=1.25, form="upper bound alone")

# --- reductions ---
REDUCED = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare")
for op in (*REDUCED, "ReduceLogSum", "ReduceLogSumExp"):
    x = numbers(2, 3, 4, low=0.2)
    add(op, (7, 11), x, axes=[1], keepdims=0, form="axes as attribute, keepdims 0")
    add(op, (11, 18), x, form="all axes")
    add(op, 18, x, ints(-1, 0), form="axes as input")
    add(op, 18, x, ints(1), keepdims=0, form="axes as input, keepdims 0")
    add(op, 13, x, keepdims=0, form="all axes, keepdims 0")
add("ReduceSum", 13, numbers(2, 3), ints(), noop_with_empty_axes=1, form="no axes")
add("ReduceMean", 18, numbers(2, 3), noop_with_empty_axes=1, form="no axes")
add("ReduceProd", 18, np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 2.0], [1.5, -2.0, 3.0]]), ints(1), form="zeros")
add("ReduceMean", 13, numbers(2, 3, 4), axes=[-1], keepdims=0, form="negative axis")
add("CumSum", (11, 14), numbers(2, 4), np.array(1))
add("CumSum", 14, numbers(2, 4), np.array(0), exclusive=1, reverse=1, form="exclusive, reverse")
for op in ("GlobalAveragePool", "GlobalMaxPool"):
    add(op, (7, 22), numbers(2, 3, 4, 2, low=0.1))

# --- matrices ---
MATRICES = {
    "2 x 2": ((3, 4), (4, 2)),
    "3 x 2": ((2, 3, 4), (4, 2)),
    "2 x 3": ((3, 4), (2, 4, 2)),
    "4 x 4, broadcast": ((2, 1, 3, 4), (1, 3, 4, 2)),
    "1 x 2": ((4,), (4, 2)),
    "2 x 1": ((3, 4), (4,)),
    "1 x 1": ((4,), (4,)),
    "1 x 3": ((4,), (2, 4, 3)),
    "3 x 1": ((2, 3, 4), (4,)),
    "3 x 4": ((2, 3, 4), (3, 2, 4, 2)),
}
for form, (a, b) in MATRICES.items():
    add("MatMul", 13, numbers(*a), numbers(*b, seed=1), form=form)
add("MatMul", (7, 9), numbers(2, 3, 4), numbers(2, 4, 5), form="3 x 3")
for trans_a in (0, 1):
    for trans_b in (0, 1):
        a, b = numbers(*((4, 3) if trans_a else (3, 4))), numbers(*((2, 4) if trans_b else (4, 2)), seed=1)
        given = {"transA": trans_a, "transB": trans_b, "alpha": 0.7, "beta": 1.3}
        add("Gemm", (7, 11, 13), a, b, numbers(2, seed=2), form=f"{trans_a}{trans_b}", **given)
add("Gemm", 13, numbers(3, 4), numbers(4, 2), form="without c")
add("Gemm", 13, numbers(3, 4), numbers(4, 2), numbers(3, 1), wanted=(0, 2), form="column c")
EQUATIONS = {
    "ij,jk->ik": ((2, 3), (3, 4)),
    "bij,bjk->bik": ((2, 3, 4), (2, 4, 2)),
    "ij->ji": ((2, 3),),
    "ij->i": ((2, 3),),
    "ij,kl->ik": ((2, 3), (4, 2)),
    "...ij,...jk->...ik": ((2, 2, 3), (3, 2)),
    "i,j->ij": ((3,), (4,)),
    "ij,jk": ((2, 3), (3, 4)),
    "ij,jk,kl->il": ((2, 3), (3, 2), (2, 4)),
    "ij,ij->": ((2, 3), (2, 3)),
    "ij->": ((2, 3),),
    "ii->i": ((3, 3),),
    "ii->": ((3, 3),),
    "bii,ij->bj": ((2, 3, 3), (3, 2)),
    "b...i,ij->b...j": ((2, 2, 3), (3, 4)),
    "...ij,...k->...ik": ((1, 2, 3), (2, 4)),
}
for equation, shapes in EQUATIONS.items():
    operands = [numbers(*shape, seed=place) for place, shape in enumerate(shapes)]
    add("Einsum", 12, *operands, equation=equation, form=equation)

# --- layout ---
CUBE = numbers(2, 3, 4)
add("Reshape", (7, 13, 14), CUBE, ints(4, -1))
add("Flatten", (7, 9, 13), CUBE, axis=2)
add("Squeeze", (7, 11), numbers(2, 1, 3), axes=[1], form="axes as attribute")
add("Squeeze", (13, 21), numbers(2, 1, 3), ints(1), form="axes as input")
add("Squeeze", 13, numbers(2, 1, 3), form="all axes")
add("Unsqueeze", (7, 11), SMALL, axes=[0, 2], form="axes as attribute")
add("Unsqueeze", (13, 21), SMALL, ints(0, -1), form="axes as input")
add("Transpose", (7, 13, 21), CUBE, perm=[1, 2, 0])
add("Transpose", 13, CUBE, form="without perm")
for opset in (7, 11, 13, 18):
    add("Concat", opset, SMALL, numbers(2, 2), numbers(2, 1), axis=1)
add("Concat", 13, SMALL, numbers(2, 2), axis=-1, form="negative axis")
add("Split", (7, 11), numbers(5, 2), axis=0, split=[2, 3], outputs=2, form="sizes as attribute")
add("Split", 13, numbers(5, 2), ints(2, 3), outputs=2, form="sizes as input")
add("Split", 18, numbers(2, 5), axis=1, num_outputs=3, outputs=3, form="num_outputs")
add("Tile", (7, 13), SMALL, ints(2, 3))
add("Slice", (7, 9), CUBE, axes=[1, 2], starts=[0, 1], ends=[2, 10], form="attributes")
add("Slice", (10, 11, 13), CUBE, ints(0, 1), ints(2, 10), ints(1, 2), ints(1, 2), form="inputs")
add("Slice", 13, CUBE, ints(-1), ints(-100), ints(2), ints(-2), form="negative step")
add("Pad", (7, 10), SMALL, pads=[1, 0, 0, 2], value=0.5, form="attributes")
add("Pad", (11, 13, 18), SMALL, ints(1, 0, 0, 2), np.array(0.5), form="inputs")
add("Pad", 18, CUBE, ints(1, 2), None, ints(-1), form="axes")
add("Pad", 7, numbers(3, 4), pads=[1, 2, 1, 1], mode="reflect", form="reflect as attribute")
for mode in ("reflect", "edge"):
    add("Pad", (11, 18), numbers(3, 4), ints(1, 2, 1, 1), mode=mode, form=mode)
add("Pad", 19, numbers(3, 4), ints(1, 2, 1, 1), mode="wrap", form="wrap")
add("DepthToSpace", (7, 13), numbers(1, 8, 2, 3), blocksize=2)
add("DepthToSpace", (11, 13), numbers(1, 8, 2, 3), blocksize=2, mode="CRD", form="CRD")
add("SpaceToDepth", (7, 13), numbers(1, 2, 4, 6), blocksize=2)
add("Trilu", 14, numbers(3, 4), np.array(1), upper=1, form="upper")
add("Trilu", 14, numbers(2, 3, 3), upper=0, form="lower")
add("ReverseSequence", 10, numbers(4, 3), ints(2, 4, 1), time_axis=0, batch_axis=1)
add("Compress", (9, 11), numbers(3, 4), np.array([True, False, True]), axis=0)

# --- indices ---
add("Gather", (7, 11, 13), numbers(5, 3), np.array([[0, 4], [-1, 0]]))
add("Gather", 13, numbers(2, 5, 3), ints(3, 3, 1), axis=1, form="axis 1")
add("GatherElements", (11, 13), numbers(3, 3), np.array([[0, 2, 2], [1, 0, 0]]), axis=0)
add("GatherND", (11, 12, 13), numbers(2, 3, 4), np.array([[0, 1], [1, 2], [0, 1]]))
add("GatherND", 12, numbers(2, 3, 4), np.array([[1], [2]]), batch_dims=1, form="batch_dims")
add("TopK", 7, numbers(2, 5), k=2, outputs=2, form="k as attribute")
add("TopK", (10, 11, 24), numbers(2, 5), ints(2), outputs=2)
add("TopK", 11, numbers(5, 2), ints(3), axis=0, largest=0, outputs=2, form="smallest, axis 0")
add("OneHot", (9, 11), ints(0, 2, 1), np.array(3), np.array([0.3, 1.7]))
add("OneHot", 11, ints(0, -1, 1), np.array(3), np.array([0.3, 1.7]), axis=0, form="axis 0, from the end")
UPDATES = np.array([[0, 2], [1, 0]]), numbers(2, 2, seed=1)
add("Scatter", 9, numbers(2, 3), *UPDATES, axis=1)
add("ScatterElements", (11, 13, 18), numbers(2, 3), *UPDATES, axis=1)
TWICE = np.array([[0, 0], [1, 1]]), numbers(2, 2, low=0.5, seed=1)
for reduction in ("add", "mul", "max", "min"):
    add("ScatterElements", 18, numbers(2, 3), *TWICE, axis=1, reduction=reduction, form=reduction)
    places = np.array([[1], [1], [3]])
    add("ScatterND", 18, numbers(4, 2), places, numbers(3, 2, low=0.5), reduction=reduction, form=reduction)
add("ScatterND", (11, 13, 16), numbers(4, 2), np.array([[1], [3]]), numbers(2, 2, seed=1))

# The newest opset in which an operator changed, at least in the types that it takes.
CHANGED = {
    **dict.fromkeys(("ReduceMax", "ReduceMin"), 20),
    **dict.fromkeys(("Dropout", "NegativeLogLikelihoodLoss"), 22),
    **dict.fromkeys(("Attention", "CastLike", "Flatten", "Identity", "Pad", "Reshape", "Squeeze", "Transpose"), 25),
    "Unsqueeze": 25,
    **dict.fromkeys(("Cast", "Celu", "Compress", "DepthToSpace", "Einsum", "Mod", "OneHot", "ReduceLogSum"), 28),
    **dict.fromkeys(("ReduceLogSumExp", "ReverseSequence", "SpaceToDepth"), 28),
}
OLD_FORMS = re.compile("attribute")  # where inputs were attributes
newest = {(case.op, case.form): case for case in sorted(CASES, key=lambda case: case.opset) if not case.domain}
for case in newest.values():
    if case.opset < CHANGED.get(case.op, 0) and not OLD_FORMS.search(case.form):
        CASES.append(replace(case, opset=CHANGED[case.op]))

# Operators, and the first opset in which the reference evaluator has them as ONNX says, in float64.
REFERENCE_FROM = {
    **dict.fromkeys(("Softmax", "LogSoftmax"), 13),
    **dict.fromkeys(("Pad", "Slice", "TopK"), 11),
    **dict.fromkeys(("GridSample", "Scatter", "Upsample"), 99),
    "BatchNormalization": 14,
    "Resize": 11,
}

# Operators without a rule that have gradients all the same: what they become.
FUNCTION = "That of the operators by which ONNX defines it."
EXPANDED = {
    ("", "Upsample"): "That of Resize, which it becomes.",
    ("", "If"): "That of the branch that a constant condition takes.",
}

# What other tests check: operators by domain, and how.
MODELS = "models against PyTorch"
DIFFERENCES, NOTHING = "central differences", "dx = 0, nothing to differ"
RUNTIME = "in onnxruntime, against"
QUANTIZATION = ("QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear")
QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeMatMul", "MatMulIntegerToFloat")
QUANTIZED_PRODUCTS = [*(("", op) for op in ("MatMulInteger", "ConvInteger")), *((MICROSOFT, op) for op in QUANTIZED)]
NAMES_OF_RUNTIME = {  # of tests/support/runtime_cases.py
    "": "Attention LinearAttention RotaryEmbedding Col2Im Det DFT STFT RoiAlign DeformConv",
    MICROSOFT: """MatMulNBits RotaryEmbedding GroupQueryAttention ScaledSiLU GatedAdd GatedRMSNorm LinearAttentionGate
        TransposeMatMul GatherND Pad Trilu MoE QMoE LinearAttention Inverse CausalConvWithState
        MRotaryEmbedding MatMulBnb4 GatherBlockQuantized""",
}
OF_RUNTIME = [(domain, op) for domain, names in NAMES_OF_RUNTIME.items() for op in names.split()]
SEQUENCES = (
    "SequenceConstruct",
    "SequenceAt",
    "SequenceInsert",
    "SequenceErase",
    "SplitToSequence",
    "ConcatFromSequence",
)
ELSEWHERE = {
    **{
        ("", op): "central differences, in onnxruntime"
        for op in ("If", "Loop", "Scan", "Optional", "OptionalGetElement", *SEQUENCES)
    },
    **{("", op): "straight through, against known values" for op in QUANTIZATION},
    ("", "SparseSoftmaxCrossEntropy"): f"{RUNTIME} SoftmaxCrossEntropyLoss",
    ("", "SimplifiedLayerNormalization"): "by SkipSimplifiedLayerNormalization",
    (MICROSOFT, "AttentionTraining"): "by Attention of ONNX, in tiles",
    (MICROSOFT, "SoftmaxCrossEntropyLossInternal"): "against SoftmaxCrossEntropyLoss",
    (MICROSOFT, "LinearCrossEntropyLoss"): "against MatMul and SoftmaxCrossEntropyLoss",
    **{(MICROSOFT, op): f"by BatchNormalization, and {MODELS}" for op in ("BatchNormInternal", "BatchNormTraining")},
    (MICROSOFT, "FakeQuant"): f"{RUNTIME} QuantizeLinear and DequantizeLinear",
    (MICROSOFT, "DropoutTraining"): "adapters with dropout, whose layers are computed again or not",
    **{(MICROSOFT, f"{op}Training"): f"{RUNTIME} {op}" for op in ("GRU", "LSTM")},
    **dict.fromkeys([*QUANTIZED_PRODUCTS, *OF_RUNTIME], f"{RUNTIME} PyTorch"),
}
