"""Every public name has a place in the reference, and what it says there is what a caller has to know."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import opgrad

ROOT = Path(__file__).parents[1]
# Functions on arrays and tensors that are no operators of their own.
FUNCTIONS = {
    "opgrad": ("cross_entropy", "cross_entropy_and_grad", "linear_cross_entropy", "linear_cross_entropy_and_grad"),
    "opgrad.optim": ("sgd_rows", "adagrad_rows", "adam_rows"),
    "opgrad.torch": (
        *("cross_entropy", "embedding", "gather", "leaky_relu", "linear_cross_entropy", "log_softmax", "quick_gelu"),
        *("relu", "sigmoid", "softmax", "tanh"),
    ),
    "opgrad.jax": (
        *("softmax", "log_softmax", "embedding"),
        *("dot_product_attention", "cross_entropy", "linear_cross_entropy"),
    ),
}


def pages():
    """The modules that have a page: what tools/site/hooks.py names, which needs MkDocs to be imported."""
    tree = ast.parse((ROOT / "tools" / "site" / "hooks.py").read_text(encoding="utf-8"))
    (found,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["MODULES"]
    )
    return list(ast.literal_eval(found))


def loaded(module):
    if module == "opgrad.jax":
        pytest.importorskip("jax")
    return importlib.import_module(module)


def own(module):
    """The public names of a module."""
    found = loaded(module)
    defined = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == module]
    return [name for name in getattr(found, "__all__", defined) if not name.startswith("_")]


@pytest.mark.parametrize("module", pages())
def test_every_public_name_is_documented(module):
    found = loaded(module)
    for name in own(module):
        value = getattr(found, name)
        if not inspect.ismodule(value) and callable(value):
            assert inspect.getdoc(value), name


def test_every_public_name_has_a_page():
    """Operators have sections, in test_docs.py; the losses stand under opgrad; modules have pages of their own."""
    assert {*own("opgrad.call.losses")} <= set(opgrad.__all__)
    for module in pages():
        for name in own(module) if module != "opgrad.jax" else ():
            if inspect.ismodule(getattr(loaded(module), name)) and name != "base":
                assert f"{module}.{name}" in pages()
    assert {f"opgrad.{name}" for name in ("torch", "jax", "optim", "onnxruntime", "training")} <= set(pages())


def test_the_overview_leads_to_every_page():
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    for module in pages():
        path = "src/" + module.replace(".", "/")
        assert f"](../../{path}.py)" in text or f"](../../{path}/__init__.py)" in text, module


@pytest.mark.parametrize("module", FUNCTIONS)
def test_functions_say_formula_shapes_and_errors(module):
    """Each its own or by the name of the function that has it; of operators contract/test_contract.py asks it."""
    found = loaded(module)
    for name in FUNCTIONS[module]:
        text = inspect.getdoc(getattr(found, name)) or ""
        for each in (r"[Ss]hape|as for ", r"[Rr]aise", r"[Ff]ormula"):
            assert re.search(each, text), (name, text)
