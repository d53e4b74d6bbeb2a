"""Every operator's CUDA kernels, in every dtype and regime, as compiled for sm_90: no GPU is needed.

Run as a script, this file compiles a share of them and prints what it found as JSON. The tests start two such
processes, because in their own Triton may be an interpreter.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from opgrad import arrays, layout, post_ops
from opgrad.contract import DTYPES, FLOATS, INTEGERS, Spec, normalise, operators
from opgrad.dropout_attribute import Dropout
from opgrad.plans import prepare

ARCHITECTURE = 90
PROCESSES = 2
WIDEST = 16  # bytes of an access of one thread
SHARED_MEMORY = 232448  # bytes that a program can have on sm_90


@dataclass(frozen=True)
class Case:
    """A shape of an operator's first array that reaches a regime; "or": which of two depends on Triton's version.

    attributes: those that the operator has are given. gap: elements between the rows of arrays of this shape.
    indices: the shape of indices. optional: optional arguments are given too. only, dtypes: what this is for; by
    default all operators of the kind, and all dtypes.
    registers: the most of a thread. Of 64, a multiprocessor holds 1024 threads at a time, of 128 half as many.
    spilled: the most bytes of a thread.
    """

    regime: str
    shape: tuple
    attributes: dict = field(default_factory=dict)
    gap: int = 0
    indices: tuple = (5,)
    optional: bool = False
    only: str = ""
    dtypes: tuple = FLOATS
    registers: int = 128
    spilled: int = 0


FORWARD, BACKWARD = "softmax log_softmax", "softmax_grad log_softmax_grad"
LOSSES = "softmax_cross_entropy_loss softmax_cross_entropy_loss_only softmax_cross_entropy_loss_and_grad"
LOSS_GRAD = "softmax_cross_entropy_loss_grad"
NOT_DOUBLE = tuple(dtype for dtype in FLOATS if dtype != "float64")
ACROSS = {"axis": 1}
# The compiler aims at a number of registers that lets more threads run, and puts by what is needed behind a loop only.
BESIDE_LOOPS = {"spilled": 24}
# A multiprocessor has two programs to run at most, however many registers they take.
FEW = {"registers": 160}

CASES = {
    "elements": [
        Case("flat", (1 << 20,), registers=64),
        Case("flat", ((1 << 20) + 7,), registers=64),
        Case("rows", (1024, 1000), gap=24, registers=64),
    ],
    "rows": [
        Case("short rows", (8192, 64)),
        Case("one row", (4096, 4001)),
        Case("one row or cluster", (300, 8192)),
        Case("one row or cluster", (300, 32768), only=FORWARD, dtypes=NOT_DOUBLE),
        Case("one row or cluster", (300, 16384), only=BACKWARD, dtypes=NOT_DOUBLE),
        Case("long rows or cluster", (300, 1 << 17), **BESIDE_LOOPS),
        Case("long rows", (300, 1 << 20), **BESIDE_LOOPS),
        Case("few rows", (4, 1 << 17), **FEW),
        Case("columns", (64, 256, 512), ACROSS),
        Case("long columns", (512, 40000, 64), ACROSS, **BESIDE_LOOPS),
        Case("few columns", (1, 1 << 17, 32), ACROSS, **FEW),
    ],
    "classes": [
        Case("short rows", (8192, 64), only=LOSSES, optional=True),
        Case("one row", (4096, 4001), only=LOSSES),
        Case("one row", (300, 16384), only=LOSSES, dtypes=NOT_DOUBLE),
        Case("one row or cluster", (300, 8192), only=LOSSES),
        Case("one row or cluster", (300, 32768), only=LOSSES, dtypes=NOT_DOUBLE),
        Case("long rows or cluster", (300, 1 << 17), only=LOSSES, **BESIDE_LOOPS),
        Case("long rows", (300, 1 << 20), only=LOSSES, **BESIDE_LOOPS),
        Case("few rows", (4, 1 << 17), only=LOSSES, **FEW),
        Case("columns", (64, 256, 512), only=LOSSES, optional=True),
        Case("long columns", (512, 40000, 64), only=LOSSES, **BESIDE_LOOPS),
        Case("few columns", (1, 1 << 17, 32), only=LOSSES, **FEW),
        Case("pieces", (4096, 4096), optional=True, only=LOSS_GRAD),
        Case("pieces", (4096, 4001), only=LOSS_GRAD),
        Case("pieces", (64, 256, 512), only=LOSS_GRAD),
    ],
    "slices": [
        Case("whole slices", (50000, 256), indices=(16384,), only="gather"),
        Case("parts of slices", (50000, 8192), indices=(16384,), only="gather"),
        Case("few indices", (50000, 4096), indices=(32,), only="gather_grad"),
        Case("one run", (50000, 4096), indices=(1000,), only="gather_grad"),
        Case("merged runs", (128256, 4096), indices=(16384,), only="gather_grad"),
    ],
}


def every():
    """All operators with the dtypes and cases to compile them for: (operator, dtype, case), by name."""
    for op in operators().values():
        for dtype in FLOATS:
            for number, case in enumerate(CASES[op.kind]):
                if dtype in case.dtypes and (not case.only or op.name in case.only.split()):
                    yield f"{op.name}-{dtype}-{number}-{case.regime}", (op, dtype, case)


EVERY = dict(every())


# --- general forms of softmax ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A call with attributes: of an operator, for arrays of a shape and dtype.

    attributes: given the arrays' maker. loads, stores: bytes of the widest of one thread.
    """

    regime: str
    op: str
    shape: tuple
    dtype: str
    attributes: Callable = lambda array: {}
    loads: int = WIDEST
    stores: int = WIDEST
    registers: int = 128


def array_of(shape, dtype="float32"):
    """An array of which there is but one element: what a compiler needs to know of it."""
    kind = DTYPES[dtype]
    strides = layout.contiguous(shape, tuple(range(len(shape))), kind.itemsize)
    return np.lib.stride_tricks.as_strided(np.zeros(1, f"u{kind.itemsize}"), shape, strides).view(kind)


DROPOUT = Dropout(0.1, 1, 2)
ELTWISE = [
    post_ops.abs(), post_ops.clip(0, 1), post_ops.clip_v2(0, 1), post_ops.elu(0.3), post_ops.exp(),
    post_ops.gelu_erf(), post_ops.gelu_tanh(), post_ops.hardsigmoid(0.1, 0.2), post_ops.hardswish(),
    post_ops.linear(2, 3), post_ops.log(), post_ops.logistic(), post_ops.mish(), post_ops.pow(2, 3),
    post_ops.relu(0.1), post_ops.soft_relu(2), post_ops.sqrt(), post_ops.square(), post_ops.swish(), post_ops.tanh(),
]  # fmt: skip


def every_binary(array):
    """Each with an operand of another shape or dtype."""
    shapes = [(4096, 1000), (1000,), (4096, 1), ()]
    dtypes = ["float32", "bfloat16", "float8_e4m3fn", "int8", "int32", "float64"]
    names = [name for name in post_ops.BINARY_SLOPES if name != "select"]
    operands = [array(shapes[i % 4], dtypes[i % 6]) for i in range(len(names))]
    chain = [getattr(post_ops, name)(operand) for name, operand in zip(names, operands, strict=True)]
    return [*chain, post_ops.select(array((4096, 1), "bool"), array((1000,)))]


def attention(array):
    """A mask of the keys, a bias of each head."""
    return {"where": array((8, 1, 1, 512), "bool"), "post_ops": [post_ops.mul(array((16, 1, 1), "float16"))]}


def everything(array):
    return {"dropout": DROPOUT, "where": array((300, 1 << 17), "bool"), "stats": True, "save": True}


FORMS = {
    "scaled": Form("short rows", "softmax", (4096, 1000), "bfloat16", lambda _: {"logit_scale": 0.1}),
    "to int8": Form("short rows", "softmax", (4096, 1000), "float16", lambda _: {"out_dtype": "int8"}, 16, 8),
    "to float8": Form("short rows", "softmax", (4096, 1000), "float32", lambda _: {"out_dtype": "float8_e5m2"}, 16, 8),
    "from int8": Form("short rows", "log_softmax", (4096, 1024), "int8", lambda _: {"out_dtype": "float32"}),
    "float64": Form("short rows", "softmax", (4096, 1000), "float64", lambda _: {"out_scale": 0.1}),
    "attention": Form("short rows", "softmax", (8, 16, 512, 512), "float16", attention),
    "dropout": Form("short rows", "softmax", (4096, 1000), "bfloat16", lambda _: {"dropout": DROPOUT}),
    "odd rows": Form("one row", "softmax", (4096, 4001), "float32", lambda _: {"dropout": DROPOUT}, 8, 4),
    "long rows": Form("long rows", "log_softmax", (300, 1 << 17), "bfloat16", everything),
    "columns": Form("columns", "softmax", (64, 256, 512), "float32", lambda _: {"axis": 1, "dropout": DROPOUT}),
    "long columns": Form("long columns", "softmax", (64, 40000, 64), "bfloat16", lambda _: {"axis": 1, "stats": True}),
    "eltwise": Form("short rows", "softmax", (4096, 1000), "float32", lambda _: {"post_ops": ELTWISE}),
    "binary": Form("one row", "softmax", (4096, 1000), "float32", lambda array: {"post_ops": every_binary(array)}),
    "gradient": Form("one row", "softmax_grad", (4096, 4000), "bfloat16", lambda _: {"dropout": DROPOUT}),
    "mixed gradient": Form("one row", "log_softmax_grad", (4096, 4000), "float8_e5m2", lambda _: {"out_scale": 2}),
    "long gradient": Form("long rows", "softmax_grad", (300, 1 << 17), "float32", lambda _: {"dropout": DROPOUT}),
    "slopes": Form("one row", "softmax_grad", (4096, 1000), "float32", lambda _: {"post_ops": ELTWISE}, 8, 8),
    "operands' gradients": Form(
        "one row", "softmax_grad", (4096, 1000), "float32",
        lambda array: {"post_ops": every_binary(array), "post_op_grads": True}, 16, 8,
    ),
}  # fmt: skip


def program_of_form(form):
    """The program of a call."""
    op = operators()[form.op]
    first = {name: array_of(form.shape, form.dtype) for name in op.inputs}
    general, given = arrays.form(op, first | form.attributes(array_of))
    specs = [Spec(given[name].shape, given[name].dtype, given[name].strides) for name in general.inputs]
    attributes = {name: value for name, value in given.items() if name in general.attributes}
    return general.kernel("cuda")(prepare(general, specs, attributes, any_stride=True).problem)


# --- the script ----------------------------------------------------------------------------------------------------


def program_of(op, dtype, case):
    """The program for C-ordered arrays of this dtype; indices and labels are int64."""
    attributes = {name: value for name, value in case.attributes.items() if name in op.attributes}
    if "shape" in op.attributes:
        attributes["shape"] = case.shape
    known = dict(op.attributes) | attributes
    normalise(op, known, {"": case.shape})
    specs, shapes = {}, dict.fromkeys(op.inputs, ())
    for name, tensor in op.inputs.items():
        specs[name] = None
        if name not in op.optional or case.optional:
            default = case.indices if name == "indices" else case.shape
            shapes[name] = tensor.shape(shapes, known) if tensor.shape else default
            kind = DTYPES["int64" if tensor.dtypes == INTEGERS else dtype]
            specs[name] = Spec(shapes[name], kind, _strides(shapes[name], kind, case))
    return op.kernel("cuda")(prepare(op, list(specs.values()), attributes, any_stride=True).problem)


def _strides(shape, dtype, case):
    padded = (*shape[:-1], shape[-1] + case.gap) if shape == case.shape else shape
    return layout.contiguous(padded, tuple(range(len(shape))), dtype.itemsize)


def compile_share(share):
    """Compile every PROCESSES-th program from this one on."""
    from opgrad.cuda.inspect import compiled

    for name in [*EVERY, *FORMS][share::PROCESSES]:
        program = program_of(*EVERY[name]) if name in EVERY else program_of_form(FORMS[name])
        kernels = [vars(report) | {"ptx": ""} for report in compiled(program, arch=ARCHITECTURE)]
        print(json.dumps([name, program.regime, kernels]), flush=True)


# --- the tests -----------------------------------------------------------------------------------------------------


def environment():
    """That of a process in which Triton compiles."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Regime and kernels of every program by name."""
    pytest.importorskip("triton", reason="needs Triton")
    folder = tmp_path_factory.mktemp("compiled")  # a pipe would hold up the process that is not read
    files = [folder / f"{share}.json" for share in range(PROCESSES)]
    processes = []
    for share, file in enumerate(files):
        with file.open("w") as found:
            process = subprocess.Popen([sys.executable, __file__, str(share)], env=environment(), stdout=found)
        processes.append(process)
    assert [process.wait() for process in processes] == [0] * PROCESSES
    lines = [line for file in files for line in file.read_text().splitlines()]
    return {name: (regime, kernels) for name, regime, kernels in map(json.loads, lines)}


@pytest.mark.parametrize("name", EVERY)
def test_regime(programs, name):
    assert programs[name][0] in EVERY[name][2].regime.split(" or ")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("resource", ["registers", "spilled"])
def test_resources(programs, name, resource):
    most = getattr(EVERY[name][2], resource)
    over = {kernel["name"]: kernel[resource] for kernel in programs[name][1] if kernel[resource] > most}
    assert over == {}, f"more than {most}"


@pytest.mark.parametrize("name", EVERY)
def test_accesses_are_wide(programs, name):
    """Some kernel reads 16 bytes at a time, and some kernel writes as many where the result has the arrays' size."""
    op, _, _ = EVERY[name]
    large = any(result.role == "element" for result in op.results.values())
    for way in ("loads", "stores") if large else ("loads",):
        widths = {int(width) for kernel in programs[name][1] for width in kernel[way]}
        assert WIDEST in widths, way


@pytest.mark.parametrize("name", FORMS)
def test_general_forms(programs, name):
    """Whatever is asked for is one kernel, which does not spill and reads and writes as much at a time as it can."""
    form, (regime, (kernel,)) = FORMS[name], programs[name]
    assert regime == form.regime
    assert kernel["spilled"] == 0
    assert kernel["registers"] <= form.registers
    widest = [max(int(width) for width in kernel[way]) for way in ("loads", "stores")]
    assert widest == [form.loads, form.stores]


@pytest.mark.parametrize("name", [name for name, (_, _, case) in EVERY.items() if case.regime == "long rows"])
def test_long_rows_leave_no_room_for_a_second_program(programs, name):
    """So that the rows in work at a time are few enough to stay in the L2 cache."""
    (loop,) = [kernel for kernel in programs[name][1] if kernel["name"].endswith("_loop")]
    assert SHARED_MEMORY / 2 < loop["shared"] <= SHARED_MEMORY


@pytest.mark.parametrize("name", [name for name, (op, _, case) in EVERY.items() if op.kind == "elements"])
def test_elementwise_kernels_have_no_narrow_access(programs, name):
    """But for the ends of rows, and the number that scale multiplies by."""
    op, _, case = EVERY[name]
    for kernel in programs[name][1]:
        assert case.shape[-1] % WIDEST or set(kernel["stores"]) == {str(WIDEST)}
        assert case.shape[-1] % WIDEST or "factor" in op.inputs or set(kernel["loads"]) == {str(WIDEST)}


def test_nothing_is_compiled_in_the_interpreter(monkeypatch):
    triton = pytest.importorskip("triton", reason="needs Triton")
    from opgrad.cuda.execute import Program
    from opgrad.cuda.inspect import compiled

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compiled(Program(()))


@pytest.mark.parametrize("arch", [80, 90])
def test_the_example_of_compiled(arch):
    """It prints the PTX for the architecture, and leaves Triton's driver as it was."""
    pytest.importorskip("triton", reason="needs Triton")
    from opgrad.cuda.inspect import compiled

    example = textwrap.dedent(compiled.__doc__.partition("For example")[2].partition("\n\n")[2])
    example = example.replace("problem)", f"problem), arch={arch}")
    example = f"import triton\nbefore = triton.runtime.driver._active\n{example}"
    example += "\nassert triton.runtime.driver._active is before"
    run = subprocess.run([sys.executable, "-c", example], env=environment(), capture_output=True, text=True)
    assert f".target sm_{arch}" in run.stdout, run.stderr
    assert "gradient" in run.stdout.splitlines()[0]


if __name__ == "__main__":
    compile_share(int(sys.argv[1]))
