"""The self-test `opgrad check`: every operator against its float64 reference, and what the machine offers."""

import importlib
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

import opgrad
from opgrad.base.limits import default_threads
from opgrad.cli import machine
from opgrad.cli.compile import compile_calls, compile_operator, run
from opgrad.cli.examples import examples, expected, listed, signatures
from opgrad.cli.examples.arguments import error_in_ulp, tolerance
from opgrad.contract import FLOATS, Operator
from opgrad.cpu.compiler.decorators import noting, object_cache
from opgrad.cpu.compiler.processes import Work
from opgrad.cpu.plans import plan
from opgrad.ops import public_operators

CUDA = "cuda"  # the device, as PyTorch calls it
FIRST_CALL = """
import time, numpy, opgrad
start = time.perf_counter()
opgrad.softmax_grad(numpy.ones((2, 3), numpy.float32), numpy.ones((2, 3), numpy.float32))
print(time.perf_counter() - start)
"""


# The dtypes of a test, and the number of an operator's examples, None: all; by whether it is a full one.
EXTENTS = {False: (("float32",), 1), True: (tuple(FLOATS), None)}


def compile_missing(full: bool, screen: Console) -> None:
    """Compile what the tests need and the cache lacks, in several processes; what fails there, fails in its test."""
    if object_cache().problem():
        return
    todo, (dtypes, most) = [], EXTENTS[full]
    for name, op in public_operators().items():
        for dtype in dtypes:
            with suppress(Exception), noting() as missing:
                for signature in islice(signatures(op, dtype), most):
                    plan(*signature)
                if missing:
                    work = Work(compile_operator, (name, dtype, most))
                    todo.append((f"{name} {dtype}", work))
    if todo:
        with suppress(Exception):
            run([("calls", Work(compile_calls)), *todo], default_threads(), screen)


def examine(progress: Callable[[list[Operator]], Any], full: bool) -> dict[str, Any]:
    """All that the self-test finds; `right` says whether all is as it should be.

    progress: goes through the operators, and may show it. full: whether all dtypes and examples are tested.
    """
    no_cuda, (dtypes, most) = machine.cuda_problem(), EXTENTS[full]
    devices = ("cpu",) if no_cuda else ("cpu", CUDA)
    tested = [
        check_operator(op, dtype, device, most)
        for op in progress([*public_operators().values()])
        for device in (each for each in devices if each in op.support.backends)
        for dtype in dtypes
    ]
    runtime, problem = _onnxruntime()
    first_calls = _first_calls()
    cache = object_cache()
    return {
        "right": all(test["right"] for test in tested) and not problem and None not in first_calls.values(),
        "operators": tested,
        "machine": machine.describe(),
        "threads": opgrad.get_num_threads(),
        "versions": machine.versions(),
        "onnxruntime": problem or runtime,
        "cuda": {"problem": no_cuda, "device": None if no_cuda else machine.cuda_device()},
        "cache": {"folder": cache.folder, "kernels": cache.count(), "problem": cache.problem()},
        "first_call": first_calls,
    }


def check_operator(op: Operator, dtype: str, device: str = "cpu", most: int | None = None) -> dict[str, Any]:
    """The worst error of an operator over its examples, and whether all errors are within the tolerance.

    device: where its arrays are: "cpu" for NumPy's, else PyTorch's name of a device. most: so many examples at most.
    """
    if device != "cpu":
        from opgrad.call.libraries.torch_tensors import download, upload

    pairs = []
    problem = ""
    try:
        for example in islice(examples(op, dtype), most):
            given: Mapping[str, Any] = example.arguments
            if device != "cpu":
                given = {name: upload(value, device) if name in op.inputs else value for name, value in given.items()}
            results = listed(getattr(opgrad, op.name)(**given))
            found = []
            for got, exact in zip(results, expected(op, example.arguments), strict=True):
                result = got if device == "cpu" else download(got)
                if result.dtype.name in FLOATS:
                    found.append((error_in_ulp(result, exact), tolerance(result.dtype.name, example.terms)))
                else:
                    found.append((0.0 if np.array_equal(result, exact) else math.inf, 1.0))
            pairs.append(max(found, key=lambda pair: pair[0] / pair[1]))  # that comes closest to its tolerance
    except Exception as error:  # whatever it is, the other operators are still worth testing
        problem = f"{type(error).__name__}: {error}"
    for ulp, allowed in pairs:
        if ulp > allowed:
            problem = f"error of {ulp:.3g} ulp, expected at most {allowed:.3g}"
    worst = max((ulp for ulp, _ in pairs if math.isfinite(ulp)), default=None)
    known = {"operator": op.name, "device": device, "dtype": dtype}
    return known | {"error_ulp": worst, "problem": problem, "right": not problem}


def _onnxruntime() -> tuple[str, str]:
    """The state of onnxruntime with opgrad, and the problem, if there is one."""
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ModuleNotFoundError:
        return 'not installed; pip install "opgrad[onnx]"', ""
    try:
        from opgrad.onnxruntime import register

        register(onnxruntime.SessionOptions())
    except Exception as error:  # to be shown, like all that may be wrong with a machine
        return "", f"{onnxruntime.__version__}: {type(error).__name__}: {error}"
    return f"{onnxruntime.__version__}: operators registered", ""


def _first_calls() -> dict[str, float | None]:
    """Seconds of the first call of softmax_grad in a new process: nothing compiled yet, then from the cache."""
    found = dict[str, float | None]()
    with tempfile.TemporaryDirectory(prefix="opgrad-check-") as folder:
        for state in ("cold", "warm"):
            environment, command = {**os.environ, "OPGRAD_CACHE_DIR": folder}, [sys.executable, "-c", FIRST_CALL]
            output = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
            found[state] = float(output) if output else None
    return found


def show(screen: Console, found: dict[str, Any]) -> None:
    for device in dict.fromkeys(test["device"] for test in found["operators"]):
        entries = {(test["operator"], test["dtype"]): test for test in found["operators"] if test["device"] == device}
        where, dtypes = "" if device == "cpu" else f" on {device}", list(dict.fromkeys(dtype for _, dtype in entries))
        table = Table()
        table.add_column("operator", no_wrap=True)
        for dtype in dtypes:
            table.add_column(dtype, justify="right")
        for name in dict.fromkeys(name for name, _ in entries):
            tests = (entries[name, dtype] for dtype in dtypes)
            table.add_row(name, *(f"{t['error_ulp']:.2f}" if t["right"] else Text("wrong", "bold red") for t in tests))
        screen.print(f"worst error in ulp against float64{where}", style="italic")  # as a title it would be wrapped
        screen.print(table)
        for test in entries.values():
            if not test["right"]:
                what = f"{test['operator']} {test['dtype']}{where}"
                screen.print(f"{what}: {test['problem']}", style="red")
    here, cache, cuda = found["machine"], found["cache"], found["cuda"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("CPU", f"{here['cpu']} ({here['llvm_cpu']}, {here['architecture']}), {here['cores']} cores")
    table.add_row("vectors", f"{here['vector_bits']} bits; {', '.join(here['features']) or 'baseline features'}")
    caches = ", ".join(f"{level} {size >> 10} KiB" for level, size in here["caches"].items())
    table.add_row("caches", caches or "unknown")
    table.add_row("threads", f"{found['threads']}, opgrad's own")
    table.add_row("kernels", f"{cache['kernels']} in {cache['folder']}" if cache["folder"] else "none kept")
    if cache["problem"]:
        table.add_row("", f"new ones are not kept: {cache['problem']}")
    calls = found["first_call"].values()
    cold, warm = (f"{seconds:.2f} s" if seconds is not None else "failed" for seconds in calls)
    table.add_row("first call", f"{cold} compiled, {warm} from the cache")
    table.add_row("onnxruntime", found["onnxruntime"])
    told = f"not used: {cuda['problem']}"
    if not cuda["problem"]:
        device = cuda["device"]
        told = f"{device['name']}, capability {device['capability']}, driver {device['driver']}"
        told += f", Triton {found['versions']['triton']}"
    table.add_row("CUDA", told)
    installed = [f"{name} {version or 'missing'}" for name, version in found["versions"].items()]
    table.add_row("versions", ", ".join(installed))
    screen.print(table)
    verdict = "All is right." if found["right"] else "Something is wrong."
    screen.print(verdict, style="bold green" if found["right"] else "bold red")
