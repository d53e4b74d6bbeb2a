"""Which operators have gradients, which have none by nature, and which are refused: one list, with the reasons.

An error gives the reason that stands here, and the table of docs/reference/runtime-operators.md is made of it.
"""

from dataclasses import dataclass
from typing import Any

from onnx import defs

from opgrad.onnx.graph.messages import CLASSICAL, MICROSOFT, names_of
from opgrad.onnx.rules.node import ALL_INPUTS, RULES, Node, gradient

BLOCKED = "com.microsoft.nchwc"
Names = dict[tuple[str, str], str]


def _named(domain: str, names: str, reason: str) -> dict[tuple[str, str], str]:
    return {(domain, name): reason for name in names_of(names)}


_INTEGERS, _WORDS = "it computes with integers or bits", "its inputs or results are texts or maps"
_CHOOSES, _SIZES = "it chooses tokens", "its result depends on sizes alone"
# Operators without inputs of floating point, or whose results are none.
NONE: Names = {
    **_named("", "BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor", _INTEGERS),
    **_named("", "RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer", _WORDS),
    **_named("", "BlackmanWindow HammingWindow HannWindow MelWeightMatrix", _SIZES),
    **_named("", "RandomNormal RandomUniform", "its result is random"),
    **_named("", "OptionalHasElement SequenceEmpty", "its result is a condition, a number or empty"),
    **_named(CLASSICAL, "CastMap DictVectorizer ZipMap", _WORDS),
    **_named(MICROSOFT, "BeamSearch GreedySearch Sampling WhisperBeamSearch BifurcationDetector", _CHOOSES),
    **_named(MICROSOFT, "DynamicTimeWarping", "its result is a way through the input, of integers"),
    **_named(MICROSOFT, "MurmurHash3 NGramHashMapping VarlenNGramHashMapping Range", _INTEGERS),
    **_named(MICROSOFT, "GatherPacked QEmbedLayerNormalization", "its tables are integers"),
    **_named(MICROSOFT, "Tokenizer", _WORDS),
}
_LAYOUT = (
    "its tensors are in a layout of onnxruntime's own kernels; save the model with an optimization level below "
    "ORT_ENABLE_ALL"
)
_PREPARES = "it prepares the columns of a table, before what is trained"
_REMOVED = "ONNX removed it before its first stable version; export the model with a newer opset"
_ALL_INTEGERS = (
    "it belongs to models of integers alone; quantize the model with pairs of QuantizeLinear and DequantizeLinear "
    "(QuantFormat.QDQ), through which gradients go"
)
_FITTED = "its coefficients are attributes, which are fitted whole; expected Gemm, MatMul and Add"
_RARE = "it is a fused kernel of few models, for inference; take the model before it is fused"
_DECODES = "it belongs to generation, a token at a time"
REFUSED: Names = {
    **_named("", "MemcpyFromHost MemcpyToHost", "onnxruntime inserts it between devices; take the model before it did"),
    **_named(
        CLASSICAL, "SVMClassifier SVMRegressor", "a support vector machine is fitted whole, and not by gradients of it"
    ),
    **_named(CLASSICAL, "LinearClassifier LinearRegressor", _FITTED),
    **_named(CLASSICAL, "ArrayFeatureExtractor FeatureVectorizer Imputer Normalizer Scaler", _PREPARES),
    **_named("", "QLinearConv QLinearMatMul", _ALL_INTEGERS),
    **_named(
        MICROSOFT,
        """DynamicQuantizeLSTM MatMulInteger16 NhwcMaxPool QAttention QGemm QLinearAdd QLinearAveragePool QLinearConcat
        QLinearConv QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearSigmoid QLinearSoftmax QLinearWhere""",
        _ALL_INTEGERS,
    ),
    **_named("", "GlobalLpPool LpPool", "no exporter writes it; expected Pow, AveragePool and Mul"),
    **_named("", "MaxUnpool", "no exporter writes it; expected ScatterElements with the indices of MaxPool"),
    **_named("", "CumProd TensorScatter", "no exporter writes it; expected Scan, ScatterElements"),
    **_named("", "Unique", "PyTorch has no gradient of it either"),
    **_named(
        MICROSOFT,
        "GatedDeltaNet",
        "packed graphs for CUDA alone have it; expected LinearAttention, the builder's default",
    ),
    **_named(MICROSOFT, "ExpandDims", "no exporter writes it; expected Unsqueeze"),
    **_named(MICROSOFT, "GridSample", "PyTorch's exporter no longer writes it; expected GridSample of ai.onnx"),
    **_named("", "MaxRoiPool", "it rounds regions to whole elements, as only old detectors do; expected RoiAlign"),
    **_named("", "Affine Crop DynamicSlice ImageScaler ParametricSoftplus Scale ScaledTanh", _REMOVED),
    **_named(MICROSOFT, "AttnLSTM", "its steps have an attention of their own"),
    **_named(
        MICROSOFT, "MaxpoolWithMask", "its kernel ends a row of a window at the first element that its mask hides"
    ),
    **_named(MICROSOFT, "DecoderMaskedMultiHeadAttention VarlenCausalConvWithState", _DECODES),
    **_named(
        MICROSOFT,
        "BranchwiseRMSNorm EngramGate HyperConnectionPostMix HyperConnectionPreMix MoEGroupRouter SparseAttention",
        _RARE,
    ),
    **_named(MICROSOFT, "NGramRepeatBlock", _CHOOSES),
    **_named(MICROSOFT, "CDist", "it measures distances for nearest neighbours; expected Sub and ReduceSumSquare"),
    **_named(MICROSOFT, "ConvTransposeWithDynamicPads", "its pads are computed; expected ConvTranspose"),
    **_named(MICROSOFT, "CropAndResize", "only few old detectors have it; expected RoiAlign"),
    **_named(MICROSOFT, "SampleOp", "it is an example of an operator; expected Identity"),
    **_named(MICROSOFT, "UnfoldTensor", "PyTorch's exporter no longer writes it; expected Gather"),
    **_named(MICROSOFT, "Unique", "it is an old form of Unique of ai.onnx"),
    **_named(MICROSOFT, "MatMulFpQ4", "its weights are in the order of a kernel"),
    **_named(MICROSOFT, "SparseToDenseMatMul", "it takes sparse tensors"),
    **_named(MICROSOFT, "WordConvEmbedding", "it looks texts up by letters"),
    **_named(
        BLOCKED, "AveragePool Conv GlobalAveragePool GlobalMaxPool MaxPool ReorderInput ReorderOutput Upsample", _LAYOUT
    ),
}
# Operators of other execution providers, which the CPU has none of.
ELSEWHERE = _named(
    MICROSOFT,
    "BiasAdd BiasSplitGelu FusedMatMulActivation GemmFastGelu GroupNorm NhwcConv NhwcFusedConv SkipGroupNorm SwiGLU",
    "it is a fused kernel of other processors; take the model before it is optimized for them",
)
# Operators that become others before they are differentiated.
BECOMES: Names = {("", "Upsample"): "that of Resize, which it becomes"}
YES, NO, NOT_YET = "gradient", "none by nature", "refused"


@dataclass(frozen=True)
class Coverage:
    """Whether an operator has a gradient: one of YES, NO and NOT_YET; and how, or why not."""

    kind: str
    text: str


def coverage(domain: str, name: str) -> Coverage | None:
    """What is said of an operator; None if nothing is."""
    key, declared = (domain, name), RULES.get((domain, name))
    if key in REFUSED:
        return Coverage(NOT_YET, REFUSED[key])
    if key in NONE or (declared is not None and declared.rule is zero):
        return Coverage(NO, NONE.get(key, "its result does not change with its inputs, or is no number"))
    if declared is not None or key in BECOMES:
        return Coverage(YES, BECOMES.get(key, "a rule"))
    if domain or not defs.has(name):
        return None
    schema: Any = defs.get_schema(name)  # onnx's type stubs lack the members read below
    is_function = schema.has_function or schema.has_context_dependent_function
    return Coverage(YES, "that of the operators by which ONNX defines it") if is_function else None


def reason(domain: str, name: str) -> str | None:
    """Why an operator has no gradient, None if it is not told."""
    return (REFUSED | ELSEWHERE | NONE).get((domain, name))


@gradient("Floor", "Ceil", "Round", "Sign", "Hardmax", constant=ALL_INPUTS)
@gradient("ConstantOfShape", "EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli", constant=ALL_INPUTS)
@gradient("Shape", "Size", "NonZero", "ArgMax", "ArgMin", "IsNaN", "IsInf", "Range", constant=ALL_INPUTS)
@gradient("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And", "Or", "Xor", constant=ALL_INPUTS)
@gradient("NonMaxSuppression", "Multinomial", "SequenceLength", constant=ALL_INPUTS)
@gradient("StopGradient", domain=MICROSOFT, constant=ALL_INPUTS)
@gradient("Binarizer", "CategoryMapper", "LabelEncoder", "OneHotEncoder", domain=CLASSICAL, constant=ALL_INPUTS)
@gradient("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor", domain=CLASSICAL, constant=ALL_INPUTS)
def zero(_: Node) -> None:
    """dx = 0."""
