"""The declarations are complete, and everything else follows from them."""

import ast
import importlib
import inspect
import math
import re
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from samples import call, refused, sample

import opgrad
from opgrad import contract
from opgrad.call import owners
from opgrad.cli.examples import own_examples
from opgrad.cli.examples.arguments import SHAPES
from opgrad.contract import FLOATS, INTEGERS, Spec
from opgrad.cpu import plans
from opgrad.ops import FAMILIES, graph_operators, loss_operators, operators, public_operators, tensor_operators

pytestmark = pytest.mark.any_cpu

PACKAGE = Path(opgrad.__file__).parent


def test_every_file_of_operators_is_a_family():
    files = {path.stem for path in (PACKAGE / "ops").glob("*.py")} - {"__init__"}
    assert files == {*FAMILIES}
    every = {**operators(), **graph_operators()}.values()
    assert files == {op.family for op in [*every, *loss_operators().values()]}
    assert all(own_examples(op) or op.kind in SHAPES for op in every)


def test_signature(op):
    function = getattr(opgrad, op.name)
    signature = inspect.signature(function)
    more = set(op.general.keywords) & set(signature.parameters) if op.general else set(op.instead)
    assert all(signature.parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ("out", *more))
    assert signature.parameters["out"].default is None
    assert tuple(name for name in signature.parameters if name not in more) == op.parameters
    assert {*op.inputs, *op.attributes, "out"} == set(op.parameters)
    assert function.__name__ == op.name
    assert function.__module__ == "opgrad"
    assert op.reference.__module__ == f"opgrad.ops.{op.family}"


@pytest.mark.parametrize("op", public_operators().values(), ids=lambda op: op.name)
def test_docstring(op):
    text = inspect.getdoc(getattr(opgrad, op.name))
    lines = text.splitlines()
    assert lines[0].endswith(".")
    assert not lines[1]
    reused = "The arguments are those of" in text
    for name in op.parameters:
        assert reused or f"{name}:" in text or f"{name}," in text, name
    for word in ("Returns", "Raises TypeError", "ValueError", "Formula:"):
        assert word in text, word
    assert "Source: " in text
    assert re.search(r"[Ss]hape|\bN x\b|as for ", text)
    for name in op.onnx:
        assert name.name in text, name.name


def test_forward(op):
    assert op.name.endswith("_grad") == bool(op.forward)
    if op.forward:
        assert op.forward in operators()


def test_tensors(op):
    for name, tensor in {**op.inputs, **op.results}.items():
        assert set(tensor.dtypes) <= {*FLOATS, *INTEGERS}, name
        assert tensor.shape is None or tensor.as_in or name in ("loss", "y", "dx"), name
    assert set(op.in_place) <= set(op.results)
    for result, names in op.in_place.items():
        assert set(names) <= set(op.inputs), result


def test_what_takes_labels_or_indices_has_check(op):
    assert ("check" in op.attributes) == bool({"labels", "indices"} & set(op.inputs))
    assert op.attributes.get("check", False) is False
    assert all("check" not in name.attributes for name in op.onnx)


def test_onnx_names(op):
    for name in op.onnx:
        known = {*op.inputs, *op.attributes}
        assert {each.rstrip("?") for each in name.inputs} <= known, name.name
        assert len(name.outputs) >= len(op.results), name.name
    every = [name.name for each in operators().values() for name in each.onnx]
    assert len(every) == len(set(every))


def test_kernel_has_the_operator_s_name_and_family(op):
    kernel = op.kernel("opgrad.cpu.programs")
    assert kernel is getattr(importlib.import_module(f"opgrad.cpu.programs.{op.family}"), op.name)
    refused(NotImplementedError, f"^{op.name}: no kernel here", op.kernel, "opgrad.base")


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_kernels_are_where_the_declarations_say(backend):
    """By their sources: what a backend's files import need not be installed."""
    for op in {**operators(), **graph_operators()}.values():
        room = PACKAGE / {"cpu": "cpu/programs", "cuda": "cuda"}[backend]
        files = [room / f"{op.family}.py", room / op.family / "__init__.py"]
        nodes = [node for file in files if file.exists() for node in ast.parse(file.read_text(encoding="utf-8")).body]
        functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        functions |= {ast.unparse(target) for node in nodes if isinstance(node, ast.Assign) for target in node.targets}
        assert (op.name in functions) == (backend in op.support.backends), op.name


def test_operators_of_every_front_end():
    assert all({"numpy", "torch", "cupy", "jax"} <= set(op.support.front_ends) for op in operators().values())
    for op in (op for name, op in graph_operators().items() if name not in tensor_operators()):
        assert "numpy" in op.support.front_ends
        refused(NotImplementedError, f"^{op.name}: no kernel for other arrays than NumPy's", owners.run, op, {})


def test_an_annotation_names_its_check():
    """A type alone has the check of the type; the message is the same for every operator."""
    softmax, gelu = operators()["softmax"], operators()["quick_gelu"]
    for op, name in ((gelu, "alpha"), (softmax, "logit_scale")):
        refused(TypeError, f"^{op.name}: {name} is 'x', expected a number$", contract.normalise, op, {name: "x"}, {})
    contract.normalise(gelu, {"alpha": math.inf}, {})
    with pytest.raises(ValueError, match=r"^softmax: logit_scale is inf, expected a finite number"):
        contract.normalise(softmax, {"logit_scale": math.inf}, {})
    even = contract.one_of("even", "odd")
    assert contract.check_of(Annotated[str, even]) is even
    assert contract.check_of(str) is None


def test_plan_of_specs(op, rng):
    """Front ends make plans from shapes and dtypes alone."""
    arguments = sample(op, (6, 5), "float32", rng)
    values = [arguments.get(name) for name in op.arrays]
    specs = [None if value is None else Spec(value.shape, value.dtype) for value in values]
    attributes = {name: arguments[name] for name in op.attributes if name in arguments}
    plan = plans.plan(op, specs, attributes)
    results = call(op, arguments)
    assert [(spec.shape, spec.dtype) for spec in plan.problem.results.values()] == [(r.shape, r.dtype) for r in results]
    assert plan.parts_max >= 1
    assert plan.scratch_bytes >= 0


def test_the_number_of_kept_plans_is_bounded(rng, monkeypatch):
    runners = inspect.getclosurevars(opgrad.relu._python).nonlocals["runners"]
    monkeypatch.setattr(runners, "most", 8)
    monkeypatch.setattr(plans.PLANS, "most", 9)
    for size in range(1, 40):
        opgrad.relu(np.zeros(size, np.float32))
    assert len(runners.values) == 8
    assert len(plans.PLANS.values) == 9
