"""What the rules are checked with: operators in the forms of several opsets, on small arrays.

The table in docs/gradients.md is made of these, too.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper

MICROSOFT = "com.microsoft"
NEWEST = onnx.defs.onnx_opset_version()


@dataclass(frozen=True)
class Case:
    """A node in one opset.

    arrays: its inputs; None for one that is left out. wanted: the places of those to differentiate with respect to.
    outputs: how many the node has. form: in a few words, what is special.
    """

    op: str
    opset: int
    arrays: tuple
    attributes: dict = field(default_factory=dict)
    wanted: tuple = (0,)
    outputs: int = 1
    domain: str = ""
    form: str = ""

    def __str__(self):
        return f"{self.op}-{self.opset}-{self.form}".rstrip("-").replace(" ", "_")

    @property
    def feeds(self):
        """The inputs by name."""
        return {f"x{place}": array for place, array in enumerate(self.arrays) if array is not None}

    def model(self):
        """A model of this node alone, in float64."""
        names = ["" if array is None else f"x{place}" for place, array in enumerate(self.arrays)]
        results = [f"y{place}" for place in range(self.outputs)]
        node = helper.make_node(self.op, names, results, domain=self.domain, **self.attributes)
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in self.feeds.items()
        ]
        outputs = [onnx.ValueInfoProto(name=results[0])]
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        graph = helper.make_graph([node], "graph", inputs, outputs)
        return helper.make_model(graph, opset_imports=imports, ir_version=8)


def numbers(*shape, low=-2.0, high=2.0, seed=0):
    """Numbers without ties, none of them close to a whole number of halves."""
    random = np.random.default_rng([seed, *shape])
    values = random.permutation(np.linspace(low, high, max(int(np.prod(shape)), 1)))
    return (values + 1e-3 * random.uniform(0.2, 1, values.shape)).reshape(shape)


def ints(*values):
    """An int64 array."""
    return np.array(values, np.int64)


def floats(*values):
    """A float32 array, as scales are."""
    return np.array(values, np.float32)


CASES = []


def add(op, opsets, *arrays, form="", wanted=(0,), outputs=1, domain="", **attributes):
    """A case for each of the opsets."""
    for opset in [opsets] if isinstance(opsets, int) else opsets:
        CASES.append(Case(op, opset, arrays, attributes, wanted, outputs, domain, form))


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
add("PRelu", (7, 9, 16), SMALL, numbers(3, seed=1), wanted=(0, 1))
add("Cast", (9, 13, 21), SMALL, to=TensorProto.DOUBLE)
add("CastLike", 15, SMALL, SMALL)

# --- several values ---
for op in ("Add", "Sub", "Mul", "Div"):
    add(op, (7, 13, 14), SMALL, numbers(2, 3, low=0.5, seed=1), wanted=(0, 1))
    add(op, (7, 14), numbers(2, 1, 4), numbers(3, 1, low=0.5), wanted=(0, 1), form="broadcast")
    add(op, 14, numbers(3), numbers(2, 3, low=0.5), wanted=(0, 1), form="broadcast first")
add("Div", 14, SMALL, numbers(3, low=0.5), form="constant divisor")
add("Pow", (7, 12, 15), POSITIVE, numbers(3, low=0.5), wanted=(0, 1))
add("Pow", 15, SMALL, np.array(2.0), form="square")
add("Pow", 15, SMALL, np.array(3, np.int64), form="whole exponent")
for op in ("Sum", "Mean", "Max", "Min"):
    add(op, (8, 13), SMALL, numbers(3, seed=1), numbers(2, 1, seed=2), wanted=(0, 1, 2), form="three, broadcast")
add("Mod", 13, numbers(2, 3, low=0.3, high=7), numbers(3, low=0.7), fmod=1, wanted=(0, 1))
add("Where", (9, 16), np.array([[True], [False]]), SMALL, numbers(3), wanted=(1, 2), form="broadcast")
add("Expand", (8, 13), numbers(3, 1), ints(2, 3, 4))
add("Clip", (11, 12, 13), SMALL, np.array(-1.0), np.array(1.2), wanted=(0, 1, 2), form="bounds as inputs")
add("Clip", 13, SMALL, None, np.array(1.2), form="upper bound alone")

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
add("ReduceProd", 18, np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 2.0], [1.5, -2.0, 3.0]]), ints(1), form="zeros")
add("ReduceMean", 13, numbers(2, 3, 4), axes=[-1], keepdims=0, form="negative axis")
add("CumSum", (11, 14), numbers(2, 4), np.array(1))
add("CumSum", 14, numbers(2, 4), np.array(0), exclusive=1, reverse=1, form="exclusive, reverse")
for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"):
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
    add("MatMul", 13, numbers(*a), numbers(*b, seed=1), wanted=(0, 1), form=form)
add("MatMul", (7, 9), numbers(2, 3, 4), numbers(2, 4, 5), wanted=(0, 1), form="3 x 3")
for trans_a in (0, 1):
    for trans_b in (0, 1):
        a, b = numbers(*((4, 3) if trans_a else (3, 4))), numbers(*((2, 4) if trans_b else (4, 2)), seed=1)
        given = {"transA": trans_a, "transB": trans_b, "alpha": 0.7, "beta": 1.3}
        add("Gemm", (7, 11, 13), a, b, numbers(2, seed=2), wanted=(0, 1, 2), form=f"{trans_a}{trans_b}", **given)
add("Gemm", 13, numbers(3, 4), numbers(4, 2), wanted=(0, 1), form="without c")
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
}
for equation, shapes in EQUATIONS.items():
    operands = [numbers(*shape, seed=place) for place, shape in enumerate(shapes)]
    add("Einsum", 12, *operands, equation=equation, wanted=tuple(range(len(shapes))), form=equation)

# --- softmax and losses ---
for op in ("Softmax", "LogSoftmax"):
    add(op, (7, 11, 13), numbers(2, 3, 4))
    add(op, (11, 13), numbers(2, 3, 4), axis=0, form="axis 0")
    add(op, 13, numbers(2, 3, 4), axis=1, form="axis 1")
LABELS = np.array([0, 2, 1], np.int64)
for reduction in ("mean", "sum", "none"):
    for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        add(op, (12, 13), numbers(3, 4), LABELS, reduction=reduction, form=reduction)
        weights = numbers(4, low=0.5)
        add(op, 13, numbers(3, 4), LABELS, weights, reduction=reduction, form=f"{reduction}, weights")
for op in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
    add(op, 13, numbers(2, 4, 3), np.array([[0, 3, 1], [2, 2, 0]]), ignore_index=2, form="images, ignore_index")

# --- normalizations ---
IMAGE = numbers(2, 4, 3, 2)
SCALE, BIAS = numbers(4, low=0.5), numbers(4, seed=1)
for axis, form in ((-1, ""), (1, "axis 1")):
    shape = IMAGE.shape[axis:]
    add(
        "LayerNormalization",
        17,
        IMAGE,
        numbers(*shape),
        numbers(*shape, seed=1),
        wanted=(0, 1, 2),
        axis=axis,
        form=form,
    )
add("LayerNormalization", 17, numbers(3, 5), numbers(5), wanted=(0, 1), form="without bias")
add(
    "LayerNormalization", 17, numbers(2, 3, 4), numbers(4), numbers(1), axis=1, wanted=(0, 1, 2), form="broadcast scale"
)
add("RMSNormalization", 23, numbers(2, 3, 4), numbers(4), wanted=(0, 1))
add("RMSNormalization", 23, numbers(2, 3, 4), numbers(3, 4), wanted=(0, 1), axis=1, form="axis 1")
add("InstanceNormalization", (7, 22), IMAGE, SCALE, BIAS, wanted=(0, 1, 2))
add("GroupNormalization", 18, IMAGE, SCALE[:2], BIAS[:2], num_groups=2, wanted=(0, 1, 2), form="of groups")
add("GroupNormalization", 21, IMAGE, SCALE, BIAS, num_groups=2, wanted=(0, 1, 2))
for p in (1, 2):
    add("LpNormalization", (7, 22), numbers(3, 4), p=p, axis=0 if p == 1 else -1, form=f"p {p}")
add("LRN", (7, 13), IMAGE, size=3, alpha=0.3, beta=0.6)
add("LRN", 13, IMAGE, size=2, alpha=0.3, bias=0.7, form="even size")
add("MeanVarianceNormalization", (9, 13, 18), numbers(3, 3, 2, 2))
STATISTICS = numbers(4, seed=2), numbers(4, low=0.5, seed=3)
add("BatchNormalization", (7, 9, 14, 15), IMAGE, SCALE, BIAS, *STATISTICS, wanted=(0, 1, 2), form="given statistics")
add(
    "BatchNormalization",
    (14, 15),
    IMAGE,
    SCALE,
    BIAS,
    *STATISTICS,
    training_mode=1,
    outputs=3,
    wanted=(0, 1, 2),
    form="trains",
)
add("Dropout", (7, 10, 12, 13), SMALL, form="does not train")

# --- windows ---
for opset in (7, 11, 22):
    add("Conv", opset, numbers(2, 4, 5, 4), numbers(3, 4, 3, 2, seed=1), BIAS[:3], pads=[1, 0, 1, 1], wanted=(0, 1, 2))
add(
    "Conv",
    11,
    numbers(1, 2, 7),
    numbers(2, 2, 3, seed=1),
    strides=[2],
    dilations=[2],
    wanted=(0, 1),
    form="strides, dilations",
)
add(
    "Conv",
    11,
    numbers(1, 2, 5, 6),
    numbers(2, 2, 3, 2, seed=1),
    auto_pad="SAME_UPPER",
    strides=[2, 2],
    wanted=(0, 1),
    form="SAME_UPPER",
)
add(
    "Conv",
    11,
    numbers(1, 2, 5, 6),
    numbers(2, 2, 3, 2, seed=1),
    auto_pad="SAME_LOWER",
    wanted=(0, 1),
    form="SAME_LOWER",
)
add("Conv", 11, numbers(1, 1, 3, 4, 3), numbers(2, 1, 2, 2, 2, seed=1), wanted=(0, 1), form="three axes")
for opset in (7, 11, 22):
    add(
        "ConvTranspose",
        opset,
        numbers(1, 3, 3, 4),
        numbers(3, 2, 3, 2, seed=1),
        BIAS[:2],
        strides=[2, 1],
        pads=[1, 0, 0, 1],
        wanted=(0, 1, 2),
    )
add(
    "ConvTranspose",
    11,
    numbers(1, 2, 4),
    numbers(2, 1, 3, seed=1),
    strides=[2],
    output_padding=[1],
    wanted=(0, 1),
    form="output_padding",
)
add(
    "ConvTranspose",
    11,
    numbers(1, 2, 3, 3),
    numbers(2, 2, 3, 3, seed=1),
    strides=[2, 2],
    auto_pad="SAME_UPPER",
    wanted=(0, 1),
    form="SAME_UPPER",
)
add(
    "ConvTranspose",
    11,
    numbers(1, 2, 3, 3),
    numbers(2, 2, 3, 3, seed=1),
    strides=[3, 2],
    output_shape=[10, 8],
    wanted=(0, 1),
    form="output_shape",
)
add("ConvTranspose", 11, numbers(1, 2, 4), numbers(2, 2, 2, seed=1), dilations=[2], wanted=(0, 1), form="dilations")
for opset in (7, 8, 11, 12, 22):
    add("MaxPool", opset, numbers(1, 2, 4, 5), kernel_shape=[2, 2], strides=[2, 2])
add(
    "MaxPool", 12, numbers(1, 2, 5, 5), kernel_shape=[2, 2], pads=[1, 1, 0, 0], dilations=[2, 2], form="pads, dilations"
)
for opset in (7, 11, 19, 22):
    add("AveragePool", opset, numbers(1, 2, 4, 5), kernel_shape=[2, 3], strides=[2, 1])
add("AveragePool", 11, numbers(1, 2, 4, 5), kernel_shape=[3, 3], pads=[1, 1, 1, 1], form="pads")
add(
    "AveragePool",
    11,
    numbers(1, 2, 4, 5),
    kernel_shape=[3, 3],
    pads=[1, 1, 1, 1],
    count_include_pad=1,
    form="pads that count",
)
add("AveragePool", 19, numbers(1, 1, 6, 6), kernel_shape=[2, 2], dilations=[2, 2], form="dilations")
add("AveragePool", 19, numbers(1, 1, 5, 5), kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1, form="ceil_mode")
for p in (1, 2, 3):
    add(
        "LpPool",
        (7, 18) if p == 2 else 18,
        numbers(1, 2, 4, 5, low=0.1),
        kernel_shape=[2, 2],
        strides=[2, 1],
        p=p,
        form=f"p {p}",
    )
add("MaxUnpool", (9, 11), numbers(1, 1, 2, 2), np.array([[[[5, 7], [13, 15]]]]), kernel_shape=[2, 2], strides=[2, 2])

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
    add("Concat", opset, SMALL, numbers(2, 2), numbers(2, 1), axis=1, wanted=(0, 1, 2))
add("Concat", 13, SMALL, numbers(2, 2), axis=-1, wanted=(0, 1), form="negative axis")
add("Split", (7, 11), numbers(5, 2), axis=0, split=[2, 3], outputs=2, form="sizes as attribute")
add("Split", 13, numbers(5, 2), ints(2, 3), outputs=2, form="sizes as input")
add("Split", 18, numbers(2, 5), axis=1, num_outputs=3, outputs=3, form="num_outputs")
add("Tile", (7, 13), SMALL, ints(2, 3))
add("Slice", (7, 9), CUBE, axes=[1, 2], starts=[0, 1], ends=[2, 10], form="attributes")
add("Slice", (10, 11, 13), CUBE, ints(0, 1), ints(2, 10), ints(1, 2), ints(1, 2), form="inputs")
add("Slice", 13, CUBE, ints(-1), ints(-100), ints(2), ints(-2), form="negative step")
add("Pad", (7, 10), SMALL, pads=[1, 0, 0, 2], value=0.5, form="attributes")
add("Pad", (11, 13, 18), SMALL, ints(1, 0, 0, 2), np.array(0.5), wanted=(0, 2), form="inputs")
add("Pad", 18, CUBE, ints(1, 2), None, ints(-1), form="axes")
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
add("OneHot", (9, 11), ints(0, 2, 1), np.array(3), np.array([0.3, 1.7]), wanted=(2,))
UPDATES = np.array([[0, 2], [1, 0]]), numbers(2, 2, seed=1)
add("Scatter", 9, numbers(2, 3), *UPDATES, axis=1, wanted=(0, 2))
add("ScatterElements", (11, 13, 18), numbers(2, 3), *UPDATES, axis=1, wanted=(0, 2))
TWICE = np.array([[0, 0], [1, 1]]), numbers(2, 2, low=0.5, seed=1)
for reduction in ("add", "mul", "max", "min"):
    add("ScatterElements", 18, numbers(2, 3), *TWICE, axis=1, reduction=reduction, wanted=(0, 2), form=reduction)
    places = np.array([[1], [1], [3]])
    add(
        "ScatterND",
        18,
        numbers(4, 2),
        places,
        numbers(3, 2, low=0.5),
        reduction=reduction,
        wanted=(0, 2),
        form=reduction,
    )
add("ScatterND", (11, 13, 16), numbers(4, 2), np.array([[1], [3]]), numbers(2, 2, seed=1), wanted=(0, 2))

# --- resizing ---
PICTURE = numbers(1, 2, 3, 4)
add("Upsample", 7, PICTURE, scales=[1.0, 1.0, 2.0, 3.0], mode="nearest", form="scales as attribute")
add("Upsample", 9, PICTURE, floats(1, 1, 2, 3), mode="nearest")
add("Resize", (10,), PICTURE, floats(1, 1, 2, 2), mode="nearest")
for opset in (11, 13, 18, 19):
    add("Resize", opset, PICTURE, floats(), floats(1, 1, 2, 2), mode="nearest", form="nearest")
    add("Resize", opset, PICTURE, floats(), floats(1, 1, 2.5, 0.7), mode="linear", form="linear")
for transformation in ("align_corners", "asymmetric", "pytorch_half_pixel"):
    given = {"coordinate_transformation_mode": transformation}
    add("Resize", 13, PICTURE, None, None, ints(1, 2, 5, 7), mode="linear", form=f"linear, {transformation}", **given)
add("Resize", 13, PICTURE, None, None, ints(1, 2, 5, 3), mode="nearest", nearest_mode="ceil", form="nearest, sizes")
add("Resize", 13, PICTURE, None, floats(1, 1, 1.6, 2), mode="cubic", cubic_coeff_a=-0.5, form="cubic")
add("Resize", 13, PICTURE, None, floats(1, 1, 0.7, 2), mode="cubic", exclude_outside=1, form="cubic, exclude_outside")
add("Resize", 18, PICTURE, None, floats(0.6, 0.6), axes=[2, 3], mode="linear", antialias=1, form="axes, antialias")
add("Resize", 13, numbers(1, 2, 3, 2, 2), None, floats(1, 1, 1.5, 2, 2.5), mode="linear", form="three axes")
GRID = numbers(1, 3, 2, 2, low=-1.3, high=1.3)
for padding in ("zeros", "border", "reflection"):
    for corners in (0, 1):
        given = {"padding_mode": padding, "align_corners": corners}
        form = f"{padding}, corners {corners}"
        add("GridSample", 20, PICTURE, GRID, mode="linear", wanted=(0, 1), form=f"linear, {form}", **given)
        add("GridSample", 20, PICTURE, GRID, mode="cubic", wanted=(0, 1), form=f"cubic, {form}", **given)
add("GridSample", 16, PICTURE, GRID, mode="bilinear", wanted=(0, 1), form="bilinear")
add("GridSample", 16, PICTURE, GRID, mode="bicubic", wanted=(0, 1), form="bicubic")
add("GridSample", 20, PICTURE, GRID, mode="nearest", form="nearest")
add(
    "GridSample",
    20,
    numbers(1, 2, 3, 2, 3),
    numbers(1, 2, 1, 2, 3, low=-0.9, high=0.9),
    mode="linear",
    wanted=(0, 1),
    form="three axes",
)

# --- attention ---
HEADS = [numbers(1, 2, 3, 4, seed=seed) for seed in range(3)]
add("Attention", (23, 24), *HEADS, wanted=(0, 1, 2))
add("Attention", 23, *HEADS, is_causal=1, scale=0.4, wanted=(0, 1, 2), form="causal")
add("Attention", 23, *HEADS, np.array([[0, -np.inf, 0], [0, 0, -np.inf], [0, 0, 0]]), wanted=(0, 1, 2), form="mask")
add(
    "Attention",
    23,
    *(numbers(2, 3, 4, seed=seed) for seed in range(3)),
    q_num_heads=2,
    kv_num_heads=2,
    wanted=(0, 1, 2),
    form="three axes",
)
add(
    "Attention",
    23,
    numbers(1, 4, 3, 2),
    numbers(1, 2, 3, 2, seed=1),
    numbers(1, 2, 3, 2, seed=2),
    softcap=2.0,
    wanted=(0, 1, 2),
    form="grouped heads, softcap",
)
ANGLES = [np.cos(numbers(3, 2)), np.sin(numbers(3, 2))]
add("RotaryEmbedding", 23, numbers(1, 2, 3, 4), *ANGLES, ints(0, 1, 2).reshape(1, 3), wanted=(0,))

# --- com.microsoft ---
TOKENS, WIDE = numbers(2, 3, 4), numbers(2, 3, 8)
for op in ("Gelu", "QuickGelu", "FastGelu"):
    add(op, 17, TOKENS, domain=MICROSOFT)
add("QuickGelu", 17, TOKENS, alpha=1.2, domain=MICROSOFT, form="alpha")
for op in ("BiasGelu", "FastGelu"):
    add(op, 17, TOKENS, numbers(4), wanted=(0, 1), domain=MICROSOFT, form="bias")
add(
    "FusedMatMul",
    17,
    numbers(2, 4, 3),
    numbers(2, 5, 4),
    transA=1,
    transB=1,
    alpha=0.5,
    wanted=(0, 1),
    domain=MICROSOFT,
)
add("BiasSoftmax", 17, TOKENS, numbers(1, 3, 4), axis=2, is_inner_broadcast=0, wanted=(0, 1), domain=MICROSOFT)
SKIPPED = TOKENS, numbers(2, 3, 4, seed=1), numbers(4, low=0.5)
everything = (0, 1, 2, 3, 4)
add("SkipLayerNormalization", 17, *SKIPPED, BIAS, SCALE, epsilon=1e-5, wanted=everything, domain=MICROSOFT)
add("SkipSimplifiedLayerNormalization", 17, *SKIPPED, BIAS, epsilon=1e-5, wanted=(0, 1, 2, 3), domain=MICROSOFT)
QUERIES = [numbers(2, 3, 8, seed=seed) for seed in range(3)]
add("MultiHeadAttention", 17, *QUERIES, numbers(24), num_heads=2, wanted=(0, 1, 2, 3), domain=MICROSOFT)
add("MultiHeadAttention", 17, *QUERIES, num_heads=2, scale=0.3, wanted=(0, 1, 2), domain=MICROSOFT, form="scale")
PACKED = WIDE, numbers(8, 24, low=-0.5, high=0.5), numbers(24)
add("Attention", 17, *PACKED, num_heads=2, wanted=(0, 1, 2), domain=MICROSOFT)
add("ConcatTraining", 17, SMALL, numbers(2, 2), axis=1, wanted=(0, 1), domain=MICROSOFT)

# What other tests check: operators by domain, and how.
MODELS = "models against PyTorch"
ELSEWHERE = {
    **{("", op): f"{MODELS}: both directions, lengths, initial states" for op in ("RNN", "GRU", "LSTM")},
    **{("", op): "straight through, against known values" for op in ("QuantizeLinear", "DequantizeLinear")},
    ("", "SimplifiedLayerNormalization"): "by SkipSimplifiedLayerNormalization",
    (MICROSOFT, "SoftmaxCrossEntropyLossInternal"): "against SoftmaxCrossEntropyLoss",
    (MICROSOFT, "BatchNormInternal"): f"by BatchNormalization, and {MODELS}",
}
