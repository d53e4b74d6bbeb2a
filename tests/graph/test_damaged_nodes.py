"""Nodes that no operator takes: a ValueError that names the node, or NotImplementedError, whatever reads the model."""

import random
from contextlib import suppress

import numpy as np
import onnx
import pytest
from damage import damaged_model
from gradient_case import MICROSOFT
from gradient_cases import CASES
from onnx import TensorProto, helper, numpy_helper

from opgrad.gradients import gradients
from opgrad.onnx.graph.loading import check_model
from opgrad.onnxruntime import lower
from opgrad.training.make.trainability import trainability

REFUSED = (ValueError, NotImplementedError)
DAMAGED = 30  # models, of some milliseconds each


def made(op, *shapes, domain="", opset=21, outputs=1, **attributes):
    """A model of one node, whose inputs are float32; None for an input without a name."""
    names = [f"x{place}" if shape is not None else "" for place, shape in enumerate(shapes)]
    results = [f"y{place}" for place in range(outputs)]
    node = helper.make_node(op, names, results, "n", domain=domain, **attributes)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in zip(names, shapes, strict=True)
        if name
    ]
    graph = helper.make_graph([node], "g", inputs, [onnx.ValueInfoProto(name="y0")])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        (made("Relu", [2], [2]), "2 inputs, expected at most 1"),
        (made("Gemm", [2, 2]), "1 inputs, expected at least 2"),
        (made("MatMul", [2, 2], None), "no input 1"),
        (made("Concat", [2], [2]), "no attribute 'axis'"),
        (made("Softmax", [2], axis=[0]), "an attribute 'axis' of type INTS, expected INT"),
        (made("Softmax", [2], outputs=2), "2 outputs, expected at most 1"),
    ],
)
def test_what_onnx_declares_of_an_operator_holds(model, fault):
    with pytest.raises(ValueError, match=rf"the node 'n' \({model.graph.node[0].op_type}\) has {fault}"):
        gradients(model, "y0", "x0")


def test_the_bodies_of_loops_and_functions_are_checked():
    branch = helper.make_graph(made("Relu").graph.node, "b", [], [onnx.ValueInfoProto(name="y0")])
    model = made("If", [], then_branch=branch, else_branch=branch)
    with pytest.raises(ValueError, match=r"the node 'n' \(Relu\) has 0 inputs"):
        check_model(model, "it")
    own = made("Own", [2], domain="own")
    own.functions.append(
        helper.make_function("own", "Own", ["x"], ["y"], made("Relu").graph.node, [helper.make_opsetid("", 21)])
    )
    with pytest.raises(ValueError, match=r"the node 'n' \(Relu\) has 0 inputs"):
        check_model(own, "it")


# Operators of com.microsoft, which ONNX does not declare, and values that a declaration does not tell.
FOUND = [
    made("Inverse", domain=MICROSOFT),
    made("FusedMatMul", [3], [3], domain=MICROSOFT),
    made("FusedMatMul", [2, 3], [3, 2], domain=MICROSOFT, transA="x"),
    made("GroupQueryAttention", [1, 2, 8], [1, 2, 8], [1, 2, 8], domain=MICROSOFT),
    made("MultiHeadAttention", [1, 2, 8], [1, 2, 8], [1, 2, 8], domain=MICROSOFT),
    made("MatMulBnb4", [2, 3], [6], [1], domain=MICROSOFT, K=3, N=2),
    made("Attention", [1, 2, 8], [8], domain=MICROSOFT, num_heads=0),
    made("UnfoldTensor", [2, 3], domain=MICROSOFT),
    made("GRU", [2, 3], [1, 6, 2], [1, 6, 2], hidden_size=2),
    made("Slice", [2, 3], opset=9, axes=[2], starts=[0], ends=[1]),
    made("ReduceProd", [2, 3], opset=11, axes=[7]),
]


@pytest.mark.parametrize("model", FOUND, ids=[each.graph.node[0].op_type for each in FOUND])
def test_damage_that_no_declaration_tells_is_refused(model):
    for act in (lambda each: gradients(each, "y0", "x0"), lower, trained):
        with suppress(*REFUSED):
            act(model)


def trained(model):
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    copy.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float32), "x0"))
    return trainability(copy)


def test_seeded_damage_to_every_kind_of_node_is_refused():
    for seed in range(DAMAGED):
        chance = random.Random(seed)
        content = damaged_model(chance.choice(CASES).model().SerializeToString(), chance)
        with suppress(*REFUSED):
            gradients(content, "y0", "x0", plain=seed % 2 == 0)
