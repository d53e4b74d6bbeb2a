"""How large files, functions and kernels' parameter lists may grow."""

import ast
from pathlib import Path

import pytest

import opgrad

SOURCE = Path(opgrad.__file__).parent
FILES = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
FILE_LINES, FUNCTION_LINES, KERNEL_PARAMETERS = 400, 40, 10
# Triton takes constants alone to choose by, in one chain.
CHAINS = {"cuda/post_ops.py:value", "cuda/post_ops.py:slope"}


def functions():
    """Each function with its place."""
    for place, text in FILES.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{place}:{node.name}", node


def lines_of_functions():
    """Without their docstrings, and without the functions inside of them, which are counted themselves."""
    return {place: own_lines(node) for place, node in functions()}


def own_lines(node):
    return node.end_lineno - node.lineno + 1 - lines_of_docstring(node) - sum(map(lines_inside, inner_functions(node)))


def inner_functions(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from inner_functions(child)


def lines_inside(node):
    return node.end_lineno - min([node.lineno, *(each.lineno for each in node.decorator_list)]) + 1


def lines_of_docstring(node):
    return 0 if ast.get_docstring(node) is None else node.body[0].end_lineno - node.body[0].lineno + 1


def parameters_of_kernels():
    """Those of functions that are decorated as kernels of the CPU."""
    kernels = ((place, node.args) for place, node in functions() if "kernel" in map(ast.unparse, node.decorator_list))
    return {place: len(a.posonlyargs + a.args + a.kwonlyargs) for place, a in kernels if place.startswith("cpu/")}


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ({place: text.count("\n") for place, text in FILES.items()}, FILE_LINES),
        ({place: lines for place, lines in lines_of_functions().items() if place not in CHAINS}, FUNCTION_LINES),
        (parameters_of_kernels(), KERNEL_PARAMETERS),
    ],
    ids=["lines of a file", "lines of a function", "parameters of a kernel"],
)
def test_limit(sizes, limit):
    assert len(sizes) > 100
    assert {place: size for place, size in sizes.items() if size > limit} == {}


def test_chains_are_still_needed():
    lines = lines_of_functions()
    assert all(lines[place] > FUNCTION_LINES for place in CHAINS)
