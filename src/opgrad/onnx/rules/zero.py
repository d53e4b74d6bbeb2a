"""Operators through which no gradient goes: their results do not change with their inputs, or are no numbers."""

from opgrad.onnx.graph.messages import CLASSICAL, MICROSOFT
from opgrad.onnx.rules.node import Node
from opgrad.onnx.rules.registry import ALL_INPUTS, gradient


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
