"""Imports point one way, contract, operators, kernels, front ends, commands; `import opgrad` loads little but NumPy."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import opgrad

PACKAGE = Path(opgrad.__file__).parent
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
HEAVY = ("numba", "llvmlite", "onnxruntime", "onnx", "torch", "triton", "cupy", "jax", "scipy", "sklearn", "matplotlib")
HEAVY += ("typer", "rich")

COMPILER = "cpu/compiler/ cpu/compiler/decorators"
STEPS = "cpu/programs/partition cpu/programs/program cpu/programs/workspace"  # what native calls know of programs
ONNX = "numpy onnx onnxruntime google"
# From the bottom up: a layer, the packages beside the standard library that its files import, at any place, and the
# layers of opgrad that they import beside their own. A file belongs to the longest beginning of its path that is here.
LAYERS = {
    "private_names": ("", ""),
    "locks": ("", ""),
    "limits": ("", ""),
    "reading": ("", ""),
    "writing": ("", "reading"),
    "terminal": ("rich typer", "writing"),
    "random": ("numpy", ""),
    "contract/": ("numpy ml_dtypes", ""),
    "post_ops": ("numpy", "contract/"),
    "recurrences": ("numpy", "contract/"),
    "attention_reference": ("numpy", "contract/ random"),
    "fused/": ("numpy", "contract/ post_ops"),
    "ops/": ("numpy", "attention_reference contract/ fused/ post_ops random recurrences"),
    # the CPU
    "cpu/": ("", ""),
    "cpu/compiler/": ("", ""),
    "cpu/compiler/target": ("llvmlite", "cpu/compiler/"),
    "cpu/compiler/lowering/": ("numba llvmlite", "cpu/compiler/ cpu/compiler/target locks private_names"),
    "cpu/compiler/emit": ("llvmlite", "cpu/compiler/ cpu/compiler/target cpu/compiler/lowering/"),
    "cpu/compiler/interpret/": ("numpy ml_dtypes", "cpu/compiler/ cpu/compiler/target"),
    "cpu/compiler/processes": ("", "cpu/compiler/ cpu/compiler/target limits locks"),
    "cpu/compiler/decorators": (
        "llvmlite",
        "cpu/compiler/ cpu/compiler/emit cpu/compiler/interpret/ cpu/compiler/processes cpu/compiler/target locks",
    ),
    # native calls: threads, then what programs are made of, then what runs their plans
    "native/threads/": ("", f"{COMPILER} cpu/compiler/target limits locks"),
    "cpu/programs/partition": ("", ""),
    "cpu/programs/workspace": ("", f"contract/ {COMPILER} native/threads/"),
    "cpu/programs/program": ("numpy", f"contract/ {COMPILER} cpu/programs/partition cpu/programs/workspace"),
    "native/": (
        "numpy",
        f"contract/ {COMPILER} cpu/compiler/interpret/ cpu/compiler/processes cpu/compiler/target {STEPS} limits locks"
        " native/threads/",
    ),
    "cpu/kernels/": ("", COMPILER),
    "cpu/programs/": (
        "numpy",
        f"contract/ {COMPILER} {STEPS} cpu/kernels/ fused/ locks native/ native/threads/ random",
    ),
    # CUDA
    "cuda/": ("triton", "contract/ fused/ random"),
    # arrays of NumPy, and of other libraries
    "interop": ("", "contract/ locks"),
    "native/arrays": ("numpy", "contract/ cpu/compiler/ cpu/compiler/interpret/ interop locks native/ native/threads/"),
    "native/user_plans": ("numpy", "contract/ fused/ interop native/ native/arrays"),
    "sample_reduction": ("numpy", "contract/"),
    "losses": ("numpy", "contract/ ops/ sample_reduction"),
    "distillation": ("numpy", "contract/ ops/ sample_reduction"),
    "optim": ("numpy ml_dtypes", f"cpu/kernels/ cpu/programs/ {STEPS} native/ native/threads/"),
    "opgrad": ("", "distillation losses fused/ native/ native/arrays native/user_plans native/threads/ ops/ post_ops"),
    "interop/": ("numpy", f"native/arrays contract/ {STEPS} native/ native/threads/ cuda/ interop locks"),
    "interop/torch_private": ("torch", "private_names"),
    "interop/torch_calls": ("torch", "interop interop/torch_private native/ native/threads/"),
    "interop/cupy": ("numpy cupy torch triton", "native/arrays contract/ cuda/ interop interop/"),
    "interop/torch_copies": ("numpy ml_dtypes torch", "contract/"),
    "interop/torch_storages": ("torch", f"contract/ {STEPS} interop interop/torch_private native/ native/threads/"),
    "interop/torch_tensors": (
        "numpy ml_dtypes torch",
        "native/arrays contract/ cuda/ interop interop/ interop/torch_calls interop/torch_private"
        " interop/torch_storages native/",
    ),
    "interop/jax_private": ("jax", "contract/"),
    "interop/jax_arrays": ("numpy jax torch cupy", "contract/ interop interop/jax_private locks native/arrays"),
    "jax/": (
        "numpy jax",
        f"contract/ {COMPILER} fused/ interop interop/ interop/jax_arrays interop/jax_private locks native/"
        " native/arrays native/threads/",
    ),
    "interop/jax": ("numpy jax torch cupy", "contract/ interop interop/jax_arrays jax/ locks native/arrays"),
    "jax": ("numpy jax", "contract/ opgrad jax/"),
    # PyTorch: its operators with their gradients, calls that need them, functions with its words, losses
    "torch/": (
        "torch",
        "contract/ native/ fused/ interop interop/ interop/torch_calls interop/torch_private interop/torch_tensors",
    ),
    "interop/torch": ("torch", "contract/ interop interop/torch_calls interop/torch_tensors torch/"),
    "torch/in_place": ("torch", "interop/torch interop/torch_tensors torch/"),
    "torch/functions": ("torch", "interop/torch_calls interop/torch_tensors torch/ torch/in_place"),
    "torch/losses/": (
        "torch",
        "contract/ cpu/compiler/target interop interop/torch_calls interop/torch_private interop/torch_tensors torch/",
    ),
    "torch/optim": ("numpy torch", "interop/torch_tensors optim"),
    "torch/patching": ("torch", "contract/ torch/ torch/losses/"),
    "torch": ("torch", "interop torch/ torch/functions torch/losses/ torch/patching"),
    # ONNX: graphs without a runtime, plain forms, gradient rules; sessions of onnxruntime
    "graph/": ("numpy onnx google", "limits reading writing"),
    "forms/": ("numpy onnx", "contract/ graph/ reading"),
    "rules/": ("numpy onnx", "contract/ forms/ graph/"),
    "gradients/": ("numpy onnx google", "forms/ graph/ reading rules/"),
    "onnxruntime/": (
        ONNX,
        f"contract/ {COMPILER} {STEPS} forms/ graph/ locks native/ native/arrays native/threads/ reading writing",
    ),
    # training: files and data, graphs with gradients, blocks that build them; what trains; what is made of these
    "training/data/": ("numpy", "reading"),
    "training/engine/distributed": ("numpy torch", f"{STEPS} interop/torch_private native/ native/threads/"),
    "training/engine/optimizer": ("numpy onnx", f"contract/ cpu/kernels/ cpu/programs/ {STEPS} native/"),
    "training/formats/": (
        "numpy onnx flatbuffers ml_dtypes",
        "graph/ locks reading training/data/ training/engine/optimizer writing",
    ),
    "training/building/": ("numpy onnx", "gradients/ graph/ rules/ training/formats/"),
    "training/onnxblock/": ("numpy onnx", "graph/ reading training/building/ training/formats/"),
    "training/engine/": (
        "numpy onnx onnxruntime rich",
        "cpu/compiler/processes graph/ locks native/ native/threads/ onnxruntime/ ops/ optim training/building/"
        " training/data/ training/engine/distributed training/engine/optimizer training/formats/ writing",
    ),
    "training/run/": (
        "numpy onnxruntime matplotlib plotext rich",
        "native/threads/ reading terminal training/building/ training/data/ training/engine/"
        " training/engine/distributed training/formats/ writing",
    ),
    "training/language/": ("numpy onnx", "graph/ limits rules/ training/formats/"),
    "training/portable/": (
        "numpy onnx",
        "contract/ forms/ graph/ onnxruntime/ reading training/building/ training/engine/ training/engine/optimizer"
        " training/formats/ writing",
    ),
    "training/tune/": (
        "jinja2 numpy onnx onnxruntime onnxruntime_genai tokenizers",
        "graph/ locks native/threads/ onnxruntime/ ops/ reading training/building/ training/data/ training/engine/"
        " training/engine/distributed training/engine/optimizer training/formats/ training/language/"
        " training/portable/ training/run/ writing",
    ),
    "training/inspect/": (
        "numpy onnx rich",
        "gradients/ graph/ onnxruntime/ training/building/ training/data/ training/engine/ training/engine/optimizer"
        " training/formats/ training/tune/",
    ),
    "training/artifacts/": (
        "onnx onnxruntime",
        "graph/ onnxruntime/ training/building/ training/formats/ training/inspect/ training/onnxblock/ writing",
    ),
    "training/quantization/": (
        "numpy onnx onnxruntime ml_dtypes",
        "graph/ rules/ training/building/ training/data/ training/formats/ training/onnxblock/ training/run/ writing",
    ),
    "training/api/": (
        "numpy onnx onnxruntime",
        "graph/ native/threads/ training/data/ training/engine/ training/engine/distributed training/engine/optimizer"
        " training/formats/",
    ),
    "training": (
        "",
        "training/api/ training/data/ training/engine/ training/engine/optimizer training/formats/ training/run/"
        " training/tune/",
    ),
    # commands, and what they measure and test
    "machine": ("", "cpu/compiler/decorators cpu/programs/partition"),
    "testing/": ("numpy ml_dtypes", "opgrad native/arrays contract/"),
    "bench/": (
        "jax markdown_it matplotlib ml_dtypes numpy rich torch typer",
        f"opgrad contract/ {COMPILER} cpu/kernels/ cpu/programs/ fused/ interop/torch_copies interop/torch_tensors"
        " machine native/ native/arrays native/threads/ post_ops reading terminal testing/ torch writing",
    ),
    "packing": ("rich", f"{COMPILER} cpu/compiler/processes cpu/compiler/target writing"),
    "compile": (
        "numpy rich typer",
        f"contract/ {COMPILER} packing limits native/ native/threads/ onnxruntime/ terminal testing/ training"
        " training/engine/ training/run/",
    ),
    "check": (
        "numpy rich typer",
        f"opgrad compile contract/ {COMPILER} interop/torch_copies limits machine native/ native/threads/ onnxruntime/"
        " terminal testing/",
    ),
    "commands/": (
        "onnx rich typer",
        "graph/ onnxruntime/ terminal training training/artifacts/ training/building/ training/data/ training/engine/"
        " training/engine/distributed training/formats/ training/inspect/ training/onnxblock/ training/portable/"
        " training/quantization/ training/run/ training/tune/ writing",
    ),
    "cli": ("rich typer", "opgrad bench/ check commands/ compile contract/ onnxruntime/ terminal training/inspect/"),
    "__main__": ("", "cli"),
}


MODULES = {"opgrad." + file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): file for file in FILES}
MODULES["opgrad"] = MODULES.pop("opgrad.__init__")


def imported(file):
    """The full names of all modules that a file imports, wherever it does."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in names)


def layer(module):
    """A file, or the package itself, is a layer of its own if the table has its name without a slash."""
    path = module.removeprefix("opgrad.").replace(".", "/")
    return path if path in LAYERS else max((each for each in LAYERS if f"{path}/".startswith(each)), key=len)


@pytest.mark.parametrize("module", MODULES)
def test_direction(module):
    own, names = layer(module), set(imported(MODULES[module]))
    packages, below = (set(names.split()) for names in LAYERS[own])
    assert {name.split(".")[0] for name in names - set(MODULES)} - set(sys.stdlib_module_names) <= packages
    assert {layer(name) for name in names & set(MODULES)} <= {own, *below}


def test_kernels_import_the_compiler_and_kernels_alone():
    """No problem, program or array: what runs compiled is told all it needs to know by its arguments."""
    rooms = ("opgrad.cpu.compiler.", "opgrad.cpu.kernels.")
    for module, file in MODULES.items():
        if module.startswith("opgrad.cpu.kernels"):
            others = {name for name in imported(file) if not name.startswith(rooms) and name != "opgrad.cpu.compiler"}
            assert {name.split(".")[0] for name in others} <= set(sys.stdlib_module_names), module


def test_layers_stand_on_each_other():
    """No layer imports one that stands behind it in the table, so that rooms have no circle either."""
    order = list(LAYERS)
    for name, (_, below) in LAYERS.items():
        assert all(order.index(other) < order.index(name) for other in below.split()), name
    assert {layer(module) for module in MODULES} == set(LAYERS)


def test_no_circle():
    """Of files, and of imports at any place: inside of functions, and for type checkers alone."""
    graph = {module: set(imported(file)) & set(MODULES) - {module} for module, file in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # names the circle if there is one


@pytest.mark.parametrize("code", ["import opgrad", "import opgrad; opgrad.contract.operators()"])
def test_importing_opgrad_is_light(code):
    report = f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
