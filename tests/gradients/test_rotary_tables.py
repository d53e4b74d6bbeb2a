"""The gradients of the cosines and sines of rotary embeddings, for each shape that the tables can have."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from runtime_cases import MICROSOFT, NARROW, RuntimeCase, close, tensors_of, weighted
from runtime_cases_attention import rotated
from runtime_cases_newer import CASES

from opgrad.gradients import gradients
from opgrad.onnxruntime import InferenceSession

RANDOM = np.random.default_rng(0)
POSITIONS = np.array([[-1, 0, 6], [-7, 2, 2]])
# The shape of the tables, positions, attributes, and the formula.
FORMS = {
    "one row of the batch": ((1, 3, 2), None, {}, lambda x, c, s, _: rotated(x, c[:, None], s[:, None])),
    "the first rows": ((7, 2), None, {"interleaved": 1}, lambda x, c, s, _: rotated(x, c[:3], s[:3], 1)),
    "tokens first": (
        (7, 2),
        None,
        {"layout": "BLHD"},
        lambda x, c, s, _: rotated(x.transpose(1, 2), c[:2], s[:2]).transpose(1, 2),
    ),
    "positions from the end": ((7, 2), POSITIONS, {}, lambda x, c, s, at: rotated(x, c[at][:, None], s[at][:, None])),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_tables_are_those_of_pytorch(form, kind, plain):
    shape, positions, attributes, formula = FORMS[form]
    arrays = [RANDOM.normal(size=each).astype(kind) for each in ((2, 2, 3, 6), shape, shape)]
    given = {"rotary_embedding_dim": 4, **attributes}
    case = RuntimeCase("RotaryEmbeddingTraining", [*arrays, positions], formula, (0, 1, 2), given, MICROSOFT, opset=23)
    tensors = tensors_of(case)
    y = formula(*tensors)
    model, factors = weighted(case, np.dtype(kind), [y])
    session = InferenceSession(gradients(model, "loss", ["x0", "x1", "x2"], plain=plain).SerializeToString())
    found = session.run([f"x{place}_grad" for place in range(3)], case.feeds)
    (y * torch.tensor(factors[0])).sum().backward()
    for place, gradient in enumerate(found):
        close(gradient, tensors[place].grad.numpy(), NARROW[np.dtype(kind)] * case.terms, f"input {place}")


def test_tables_of_several_positions_are_refused_by_name():
    model = CASES["MRotaryEmbedding"].model()
    model.graph.node.append(helper.make_node("ReduceSum", ["y0"], ["loss"], keepdims=0))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    with pytest.raises(NotImplementedError, match=r"MRotaryEmbedding .* its cosines and sines are trained"):
        gradients(model, "loss", ["x2"])
