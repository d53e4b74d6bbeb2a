"""Every rule by central differences in float64, in several opsets; types that go together, and the list of all."""

import itertools

import numpy as np
import pytest
import runtime_registry
import torch
from differences import OWN, build, check, computed, in_onnxruntime, run
from gradient_cases import CASES, ELSEWHERE, NEWEST, REFERENCE_FROM
from onnx import TensorProto, defs, helper, shape_inference
from runtime_cases import MICROSOFT, NARROW, RuntimeCase, close, tensors_of, weighted
from runtime_cases_attention import rotated
from runtime_cases_newer import CASES as NEWER
from typed_cases import allowed, typed

from opgrad.gradients import gradients
from opgrad.onnx.rules.coverage import NONE, NOT_YET, REFUSED, coverage, zero
from opgrad.onnx.rules.node import RULES

# What onnx cannot convert with the gradients in it, or the reference only has in newer opsets.
PLAIN = ("MaxPool", "AveragePool", "BatchNormalization")
BY_OPERATOR = {
    op: list(cases) for op, cases in itertools.groupby(sorted(CASES, key=lambda case: case.op), lambda case: case.op)
}


@pytest.mark.parametrize("op", BY_OPERATOR)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.one_in(2)
def test_gradients_are_those_of_central_differences(op):
    for case in BY_OPERATOR[op]:
        if case.opset > NEWEST:
            continue
        own = bool(case.domain) or case.opset < REFERENCE_FROM.get(case.op, 0)
        wanted = [f"x{place}" for place in case.wanted]
        try:
            check(case.model(), case.feeds, wanted, own_forward=own, plain=op in PLAIN)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise


@pytest.mark.parametrize("operator", OWN, ids=lambda operator: operator.__name__)
def test_what_stands_for_the_reference_is_what_onnxruntime_computes(operator):
    even = [case for case in CASES if case.op == operator.__name__ and "even" not in case.form]
    case = min(even, key=lambda case: case.opset)
    np.testing.assert_allclose(
        run(case.model(), case.feeds)[0], in_onnxruntime(case.model(), case.feeds)[0], rtol=1e-5, atol=1e-5
    )


def test_every_rule_is_checked():
    checked = {(case.domain, case.op) for case in CASES} | ELSEWHERE.keys()
    through = {(declared.domain, declared.name) for declared in RULES.values() if declared.rule is not zero}
    assert through - checked == set()


KINDS = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16, "float64": TensorProto.DOUBLE}


def oldest(op, kind):
    """The cases of every form, in the first opset whose operator takes the type.

    But for halves of those of which there is one opset alone, in which test_narrow_rules checks their types.
    """
    known = sorted(
        (case for case in BY_OPERATOR[op] if case.opset <= NEWEST), key=lambda case: (case.domain, case.form)
    )
    for _, group in itertools.groupby(known, lambda case: (case.domain, case.form)):
        cases = sorted(group, key=lambda case: case.opset)
        if kind == TensorProto.DOUBLE or cases[0].domain or len(cases) > 1:
            yield from itertools.islice((case for case in cases if allowed(case, kind)), 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", BY_OPERATOR)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.one_in(3)  # test_narrow_rules computes in all of them, in the last opset, and checks types there
def test_types_go_together(op, kind):
    for case in oldest(op, KINDS[kind]):
        model, fed = typed(case, KINDS[kind])
        try:
            graph = gradients(model, "y0", list(fed), plain=True)
            shape_inference.infer_shapes(graph, check_type=True, strict_mode=True)
        except Exception as error:
            error.add_note(f"case: {case}")
            raise


def test_types_of_every_operator_are_checked():
    counts = {name: sum(len([*oldest(op, kind)]) for op in BY_OPERATOR) for name, kind in KINDS.items()}
    assert counts["float64"] > 250
    assert min(counts.values()) > 150


OPERATORS = runtime_registry.operators()


def test_something_is_said_of_every_operator_of_onnxruntime():
    assert [key for key in OPERATORS if coverage(*key) is None] == []


def test_something_is_said_of_every_operator_of_onnx():
    """But for those without inputs that a gradient could go to."""
    names = {schema.name for schema in defs.get_all_schemas() if not schema.domain} - {"Constant", "ImageDecoder"}
    assert [name for name in sorted(names) if coverage("", name) is None] == []


def test_nothing_is_listed_that_onnxruntime_does_not_run():
    assert (NONE.keys() | REFUSED.keys()) - set(OPERATORS) == set()


def test_nothing_is_refused_or_without_gradient_that_has_a_rule():
    assert (NONE.keys() | REFUSED.keys()) & RULES.keys() == set()
    assert NONE.keys() & REFUSED.keys() == set()


def test_the_error_gives_the_reason_of_the_list():
    text = "g (float[1, 1, 4, 4] x, int32[1, 1, 4, 4] m) => (float[] y)"
    model = build(f"{text} {{ y = com.microsoft.MaxpoolWithMask <kernel_shape = [2, 2]> (x, m) }}")
    said = coverage("com.microsoft", "MaxpoolWithMask")
    assert said.kind == NOT_YET
    with pytest.raises(NotImplementedError, match=said.text):
        gradients(model, "y", "x")


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
    found = computed(gradients(model, "loss", ["x0", "x1", "x2"], plain=plain), case.feeds, plain=False)[-3:]
    (y * torch.tensor(factors[0])).sum().backward()
    for place, gradient in enumerate(found):
        close(gradient, tensors[place].grad.numpy(), NARROW[np.dtype(kind)] * case.terms, f"input {place}")


def test_tables_of_several_positions_are_refused_by_name():
    model = NEWER["MRotaryEmbedding"].model()
    model.graph.node.append(helper.make_node("ReduceSum", ["y0"], ["loss"], keepdims=0))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    with pytest.raises(NotImplementedError, match=r"MRotaryEmbedding .* its cosines and sines are trained"):
        gradients(model, "loss", ["x2"])
