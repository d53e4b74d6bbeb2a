"""Imports point one way: operators, front ends, kernels, compiler; `import opgrad` loads NumPy and little more."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import opgrad

PACKAGE = Path(opgrad.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
HEAVY = ("numba", "llvmlite", "onnxruntime", "onnx", "torch", "triton", "cupy", "jax", "scipy", "sklearn", "matplotlib")
HEAVY += ("typer", "rich")

# The longest matching prefix of a file's path says which third-party packages it may import, at any place …
PACKAGES = {
    "__init__.py": set(),
    "contract.py": {"numpy", "ml_dtypes"},
    "ops/": {"numpy"},
    "arrays.py": {"numpy"},
    "layout.py": set(),
    "cpu/": {"numpy"},
    "gradients/": {"numpy", "onnx", "google"},
    "cpu/compiler/native.py": {"llvmlite"},
    "cpu/compiler/cache.py": set(),
    "cpu/compiler/sources.py": set(),
    "cpu/compiler/trust.py": set(),
    "cpu/compiler/lowering/": {"numba", "llvmlite"},
    "cuda/": {"numpy", "triton"},
    "interop/": set(),
    "interop/device.py": {"numpy"},
    "interop/dlpack.py": {"numpy"},
    "interop/torch.py": {"numpy", "ml_dtypes", "torch"},
    "interop/cupy.py": {"numpy", "cupy", "torch", "triton"},
    "interop/jax.py": {"numpy", "jax", "torch", "cupy"},
    "torch/": {"torch"},
}
# … and which parts of opgrad it may not.
COMMANDS = ("opgrad.training", "opgrad.cli", "opgrad.bench", "opgrad.check")
FRONT_ENDS = ("opgrad.onnxruntime", "opgrad.torch", *COMMANDS)
FORBIDDEN = {
    "contract.py": (
        "opgrad.ops",
        "opgrad.arrays",
        "opgrad.interop",
        "opgrad.plans",
        "opgrad.primitive",
        "opgrad.cpu",
        "opgrad.layout",
        *FRONT_ENDS,
    ),
    "ops/": ("opgrad.arrays", "opgrad.cpu", "opgrad.layout", *FRONT_ENDS),
    "arrays.py": ("opgrad.ops", "opgrad.cpu.compiler.lowering", *FRONT_ENDS),
    "layout.py": ("opgrad.ops", "opgrad.cpu", "opgrad.arrays", *FRONT_ENDS),
    "cpu/": ("opgrad.ops", "opgrad.arrays", "opgrad.cpu.compiler.lowering", *FRONT_ENDS),
    "cpu/compiler/native.py": ("opgrad.ops", "opgrad.arrays", *FRONT_ENDS),
    "cpu/compiler/lowering/": ("opgrad.ops", "opgrad.arrays", *FRONT_ENDS),
    "cuda/": ("opgrad.ops", "opgrad.arrays", "opgrad.cpu", "opgrad.interop", *FRONT_ENDS),
    "interop/": ("opgrad.ops", "opgrad.cpu.compiler.lowering", *FRONT_ENDS),
    # A tensor that requires grad is handed on to where gradients are.
    "interop/torch.py": ("opgrad.ops", "opgrad.cpu.compiler.lowering", "opgrad.onnxruntime", *COMMANDS),
    "torch/": ("opgrad.ops", "opgrad.cpu", "opgrad.cuda", "opgrad.arrays", "opgrad.onnxruntime", *COMMANDS),
    "gradients/": ("opgrad.torch", "opgrad.cpu", "opgrad.cuda", "opgrad.arrays", "opgrad.ops", *COMMANDS),
    "onnxruntime/": ("opgrad.torch", "opgrad.gradients", "opgrad.training", "opgrad.cpu.compiler.lowering"),
    "training/": ("opgrad.cpu.compiler.lowering",),
}


def imported(file):
    """The full names of all modules that a file imports, wherever it does."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rule(table, file):
    return table.get(max((prefix for prefix in table if file.startswith(prefix)), key=len, default=None))


@pytest.mark.parametrize("file", FILES)
def test_direction(file):
    names = set(imported(file))
    outside = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"opgrad"}
    allowed = rule(PACKAGES, file)
    assert allowed is None or outside <= allowed
    assert "numba" not in outside or file.startswith("cpu/compiler/lowering/")
    assert "torch" not in outside or file.startswith(("torch/", "interop/", "bench/"))
    for forbidden in rule(FORBIDDEN, file) or ():
        assert not [name for name in names if name == forbidden or name.startswith(forbidden + ".")]


@pytest.mark.parametrize("code", ["import opgrad", "import opgrad; opgrad.contract.operators()"])
def test_importing_opgrad_is_light(code):
    report = f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
