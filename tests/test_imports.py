"""The rooms of opgrad, and that imports between them run one way; `import opgrad` loads little.

After a change of the table, write the picture of CONTRIBUTING.md anew: `python tests/test_imports.py`
"""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import opgrad

PACKAGE = Path(opgrad.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms:begin, written by tests/test_imports.py -->\n", "<!-- rooms:end -->\n"
HEAVY = ("numba", "llvmlite", "onnxruntime", "onnx", "torch", "triton", "cupy", "jax", "scipy", "sklearn", "matplotlib")
HEAVY += ("typer", "rich")

# From the bottom up: a room, the packages beside the standard library that its files import, at any place, and the
# rooms that they import. A room is a folder with all that has no row of its own; "opgrad" is the files at the top.
ROOMS = {
    "base": ("rich typer", ""),
    "contract": ("numpy ml_dtypes", "base"),
    "ops": ("numpy", "contract"),
    "cpu/compiler": ("numba llvmlite", "base"),
    "cpu/runtime": ("numpy", "base contract cpu/compiler"),
    "cpu/kernels": ("", "cpu/compiler"),
    "cpu/programs": ("numpy", "base contract ops cpu/compiler cpu/runtime cpu/kernels"),
    "cpu": ("", "base contract ops cpu/compiler cpu/runtime cpu/programs"),
    "cuda": ("triton", "base contract ops"),
    "call": ("numpy ml_dtypes", "base contract ops cpu/compiler cpu/runtime cpu/kernels cpu/programs cpu"),
    "call/libraries": ("numpy ml_dtypes torch jax cupy triton", "base contract cpu/runtime cpu cuda call"),
    "onnx/graph": ("numpy onnx google", "base"),
    "onnx/passes": ("numpy onnx", "base onnx/graph"),
    "onnx/plain": ("numpy onnx", "base contract ops onnx/graph"),
    "onnx/rules": ("numpy onnx", "contract onnx/graph onnx/passes onnx/plain"),
    "onnx/gradients": ("numpy onnx", "base onnx/graph onnx/passes onnx/plain onnx/rules"),
    "opgrad": ("", "base ops call onnx/gradients"),
    "torch": ("numpy torch", "contract ops cpu/compiler call call/libraries"),
    "jax": ("numpy jax", "base contract ops cpu/compiler cpu/runtime cpu call call/libraries opgrad"),
    "onnxruntime": (
        "numpy onnx onnxruntime",
        "base contract ops cpu/compiler cpu/runtime cpu cuda onnx/graph onnx/plain",
    ),
    "training/files": ("numpy ml_dtypes onnx flatbuffers", "base onnx/graph"),
    "training/make": (
        "numpy onnx onnxruntime",
        "base onnx/graph onnx/passes onnx/rules onnx/gradients onnxruntime training/files",
    ),
    "training/engine": (
        "numpy onnx onnxruntime torch rich",
        "base ops cpu/compiler cpu/runtime cpu/kernels cpu/programs cuda call call/libraries onnx/graph"
        " onnx/passes onnxruntime training/files training/make",
    ),
    "training/run": (
        "numpy onnxruntime matplotlib rich tensorboardX",
        "base cpu/runtime training/files training/make training/engine",
    ),
    "training/export": (
        "numpy onnx",
        "base contract onnx/graph onnx/passes onnx/plain onnxruntime training/files training/make",
    ),
    "training": (
        "numpy ml_dtypes onnx onnxruntime",
        "base cpu/runtime onnx/graph onnx/passes onnx/rules training/files training/make training/engine training/run",
    ),
    "tune": (
        "numpy onnx onnxruntime onnxruntime_genai tokenizers jinja2 pyarrow",
        "base ops cpu/runtime onnx/graph onnx/rules onnx/gradients onnxruntime training/files training/make"
        " training/engine training/run training/export",
    ),
    "cli": (
        "numpy ml_dtypes onnx rich typer",
        "base contract ops cpu/compiler cpu/runtime cpu call call/libraries onnx/graph opgrad onnxruntime"
        " training/files training/make training/engine training/run training/export training"
        " tune",
    ),
}
# The one list of modules that a name leads to, whatever their room: they load a heavy library with its first array.
DOORS = "opgrad.call.owners"
# Rooms that find an operator's function by its family, in a package that they are told, or a global by its pickle.
FOUND_BY_NAME = ("opgrad.contract.declaration", "opgrad.cpu.compiler.processes")


def _name(file):
    path = file.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("__init__").rstrip("/")
    return ".".join(["opgrad", *path.split("/")]) if path else "opgrad"


MODULES = {_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imported(module):
    """The full names of all modules that a file imports, wherever it does, by statements or by strings."""
    text, found = MODULES[module].read_text(encoding="utf-8"), set()
    by_strings = "import_module(" in text and module != DOORS
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in MODULES else node.module for name in names}
        elif by_strings and isinstance(node, ast.Constant) and node.value in MODULES:
            found.add(node.value)
    return found


def room(module):
    """The room of a module."""
    path = module.replace(".", "/").removeprefix("opgrad").lstrip("/")
    found = [name for name in ROOMS if f"{path}/".startswith(f"{name}/")]
    return max(found, key=len) if found else "cli" if path == "__main__" else "opgrad"


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_what_its_row_says(name):
    files = [module for module in MODULES if room(module) == name]
    packages, rooms = (set(names.split()) for names in ROOMS[name])
    names = {other for module in files for other in imported(module)}
    assert {each.split(".")[0] for each in names - set(MODULES)} - set(sys.stdlib_module_names) == packages
    assert {room(each) for each in names & set(MODULES)} - {name} == rooms


def test_rooms_import_those_before_them():
    order = list(ROOMS)
    assert len(order) <= 30
    for name, (_, rooms) in ROOMS.items():
        assert all(order.index(other) < order.index(name) for other in rooms.split()), name


def test_no_circle_of_files():
    """Of imports at any place: inside of functions, and for type checkers alone."""
    graph = {module: imported(module) & set(MODULES) - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # names the circle if there is one


def test_the_top_is_short():
    entries = {path.name for path in PACKAGE.iterdir()} - {"__init__.py", "__main__.py", "py.typed", "__pycache__"}
    assert len(entries) <= 17


def test_every_room_says_what_it_is_for_and_what_it_imports():
    for name in ROOMS:
        assert " Imports " in said_of(name), name


def test_names_find_modules_in_the_doors_alone():
    """What is imported by a string is a module of the list, or the caller's: a library's, or an operator's family."""
    users = [module for module, file in MODULES.items() if "import_module(" in file.read_text(encoding="utf-8")]
    for module in set(users) - {DOORS, *FOUND_BY_NAME}:
        for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
            ):
                assert not ast.unparse(node.args[0]).strip("f'\"").startswith(("opgrad", "{__name__}")), module


def test_kernels_import_the_compiler_and_kernels_alone():
    """No problem, program or array: what runs compiled is told all it needs to know by its arguments."""
    for module in MODULES:
        if room(module) == "cpu/kernels":
            others = {name.split(".")[0] for name in imported(module) if name not in MODULES}
            assert others <= set(sys.stdlib_module_names), module


@pytest.mark.parametrize(
    "code", ["import opgrad; opgrad.softmax", "import opgrad.ops; opgrad.ops.operators()", "import opgrad.post_ops"]
)
def test_importing_opgrad_is_light(code):
    report = f"{code}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def said_of(name):
    file = PACKAGE / name.removeprefix("opgrad") / "__init__.py"
    return " ".join(ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))).split())


def picture():
    """The rooms from the top down, with what each is for and which rooms it imports."""
    lines = ["| room | what it is for | imports |", "| :-- | :-- | :-- |"]
    for name, (_, rooms) in reversed(ROOMS.items()):
        purpose = said_of(name).split(" Imports ")[0].rstrip(".")
        lines.append(f"| `{name}` | {purpose} | {', '.join(rooms.split())} |")
    return BEGIN + "\n".join(lines) + "\n" + END


def test_the_picture_of_the_rooms_is_current():
    text = CONTRIBUTING.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == picture()


if __name__ == "__main__":
    text = CONTRIBUTING.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    CONTRIBUTING.write_text(before + picture() + after, encoding="utf-8")
