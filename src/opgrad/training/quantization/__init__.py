"""Quantized training: a float model becomes one that rounds as integers do, is trained, and becomes an integer model.

Imports `training/run`, `training/make` and below.

`prepare` puts pairs of QuantizeLinear and DequantizeLinear into a model, whose weights stay float and whose scales
are weights, too; artifacts are made of it and trained as of any other model. `convert` makes the integer model of
what was trained. `with_teacher` and `Distillation` let it learn from the float model, too.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import onnx

from opgrad.base.arguments import ArgumentError, naming
from opgrad.onnx.graph.facts import facts_of
from opgrad.onnx.graph.loading import Model, load
from opgrad.onnx.graph.nodes import all_nodes
from opgrad.training.make.selection import Candidates
from opgrad.training.quantization import blocks, integers, placement
from opgrad.training.quantization.distillation import Distillation, with_teacher
from opgrad.training.quantization.learning import with_learned_scales
from opgrad.training.quantization.placement import WHO, choice

__all__ = ["KINDS", "Distillation", "convert", "prepare", "with_teacher"]

KINDS = ("int8", "int4")


@naming(WHO)
def prepare(
    model: Model,
    kind: str = "int8",
    calibration: Iterable[Mapping[str, np.ndarray]] = (),
    *,
    per_channel: bool = False,
    weights: Iterable[str] | None = None,
) -> onnx.ModelProto:
    """A model that rounds its numbers as integers do, for training; batch normalization becomes part of convolutions.

    model: a float model, its bytes or the path of its file; it is not changed.
    kind: "int8": weights and activations are rounded, where onnxruntime's quantizer puts its pairs, by onnxruntime's
        quantizer itself. "int4": the weights of MatMul, Gemm and Conv alone, those of products in blocks of 32 rows.
    calibration: batches of the model's inputs, by name, from which the scales of activations are found; int8 needs
        them, int4 takes none.
    per_channel: whether each channel of a convolution, and with int8 of a product, has a scale of its own.
    weights: names or patterns of those that are quantized, with int8 those of products, convolutions and tables, and
        the activations beside them. None: all.

    Each scale is exp(w) of a weight w, named as the scale with ".log" behind; its gradient is that of a learned step
    size. Source: Learned Step Size Quantization, Esser et al. 2020; logarithms as in Trained Quantization Thresholds,
    Jain et al. 2020.
    Raises TypeError and ValueError for other arguments, or a model in which nothing can be quantized.
    """
    if kind not in KINDS:
        raise ArgumentError("kind", f"is {kind!r}, expected {' or '.join(KINDS)}")
    given = load(model, WHO)
    if quantized := next((node.op_type for node in all_nodes(given.graph.node) if facts_of(node).quantized), None):
        raise ValueError(f"{WHO}: the model is quantized already, it has {quantized}; expected a float model")
    paths, choose = placement.paths_of(given), None if weights is None else choice(weights, Candidates(given))
    if kind == "int4":
        made = with_learned_scales(*blocks.placed(given, per_channel, choose))
    else:
        made = with_learned_scales(*placement.placed(given, list(calibration), per_channel, choose))
    placement.keep_paths(made, paths)
    return made


def convert(model: Model) -> onnx.ModelProto:
    """The integer model of a trained one that `prepare` made, for stock onnxruntime.

    model: what a `Trainer` exported. Weights become integers, biases of int8 products int32. onnxruntime computes int8
    operators between their pairs in its integer kernels; products of int4 are nodes MatMulNBits.
    Raises ValueError for a model in which nothing is quantized.
    """
    return integers.integer_model(load(model, integers.WHO))
