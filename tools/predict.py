"""Predict the benchmark's cells on CUDA devices: executes a few thread blocks of each kernel from its PTX, and counts.

    python tools/predict.py [--ops NAME,…] [--dtypes NAME,…] [--gpus NAME,…] [--seconds N]

Adds to bench/cuda/predictions.json, which `python -m bench --device cuda --predict` prints; cells that are
there are kept. What the model is stands in tests/support/ptx/model.py. gather and gather_grad are left out: what they
move depends on the indices.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from cuda_gate import on  # noqa: E402
from ptx.machine import Launch  # noqa: E402
from ptx.memory import GlobalMemory  # noqa: E402
from ptx.model import GPUS, Resources, predict  # noqa: E402
from ptx.program import Program  # noqa: E402
from ptx.sanitizer import Findings  # noqa: E402
from ptx.traffic import Traffic  # noqa: E402

from bench.cells import select  # noqa: E402
from bench.cuda.cells import workloads  # noqa: E402
from opgrad.cli.examples.arguments import arguments  # noqa: E402
from opgrad.contract import DTYPES, Spec  # noqa: E402
from opgrad.contract.problem import Operand  # noqa: E402
from opgrad.contract.signature import prepare  # noqa: E402
from opgrad.cuda import inspect, triton_private  # noqa: E402
from opgrad.cuda.execute import Scratch  # noqa: E402

FILE = ROOT / "bench" / "cuda" / "predictions.json"
MEMORY = 80 << 30  # bytes of a device: its cells are as large as those of devices with more
ALLOCATION = 256  # bytes: an array on a device begins at a multiple of them
MOST = 32  # thread blocks of a launch that are executed


def zeros(shape, dtype):
    """An array that begins where a device's allocator has it begin; it takes no memory until it is touched."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + ALLOCATION, np.uint8)
    place = -memory.ctypes.data % ALLOCATION
    return memory[place : place + size].view(dtype).reshape(shape)


class Zeros:
    """Arguments of zeros."""

    def integers(self, high, shape):
        return zeros(shape, np.int64)

    def normal(self, shape, dtype):
        return zeros(shape, DTYPES[dtype])

    factors = normal


def main():
    options = _options()
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    end = time.monotonic() + options.seconds
    for cell in select(options.ops, options.dtypes, options.shapes, False, workloads(MEMORY)):
        if cell.op.kind == "slices" or cell.workload.group != "plain":
            continue
        if not options.shapes and not (cell.workload.headline or options.all):
            continue
        for architecture in sorted({gpu.architecture for gpu in GPUS if gpu.name in options.gpus}):
            gpus = [gpu for gpu in GPUS if gpu.architecture == architecture and gpu.name in options.gpus]
            own = known.setdefault(cell.name, {})
            if all(gpu.name in own for gpu in gpus) or time.monotonic() > end:
                continue
            own.update(predicted(cell, architecture, gpus))
            print(cell.name, own, flush=True)
            FILE.write_text(json.dumps({name: each for name, each in known.items() if each}, indent=1) + "\n")


def _options():
    parser = argparse.ArgumentParser()
    names = {"type": lambda text: text.split(","), "default": []}
    parser.add_argument("--ops", **names)
    parser.add_argument("--dtypes", **names)
    parser.add_argument("--shapes", **names)
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=[gpu.name for gpu in GPUS])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seconds", type=float, default=1e9)
    return parser.parse_args()


def predicted(cell, architecture, gpus):
    """Seconds, bound, regime, and memory's bytes over the fewest possible, by device."""
    values = arguments(
        cell.op, cell.workload.shape, cell.dtype, source=lambda seed: Zeros(), **cell.workload.attributes
    )
    inputs = [values.get(name) for name in cell.op.inputs]
    attributes = {name: values[name] for name in cell.op.attributes if name in values}
    specs = [None if each is None else Spec(each.shape, each.dtype) for each in inputs]
    results = [zeros(spec.shape, spec.dtype) for spec in prepare(cell.op, specs, attributes).results.values()]
    out = [Spec(each.shape, each.dtype) for each in results]
    with on(architecture):
        program = cell.op.kernel("opgrad.cuda")(prepare(cell.op, specs, attributes, out, any_stride=True).problem)
        scratch = zeros((program.scratch_bytes + 16,), np.uint8)
        arrays = [*inputs, *results]
        launches = [executed(launch, architecture, arrays, scratch) for launch in program.launches]
    fewest = sum(each.nbytes for each in arrays if each is not None)
    found = {}
    for gpu in gpus:
        each = [predict(*launch, gpu) for launch in launches]
        slowest = max(each, key=lambda one: one.seconds)
        found[gpu.name] = {
            "seconds": float(f"{sum(one.seconds for one in each):.4g}"), "bound": slowest.bound,
            "regime": program.regime, "traffic": round(sum(one.bytes for one in each) / fewest, 3),
            "share": round(fewest / gpu.memory / sum(one.seconds for one in each), 3),
        }  # fmt: skip
    return found


def executed(launch, architecture, arrays, scratch):
    """What `predict` needs to know of a launch, from some of its thread blocks."""
    with triton_private.compiler_for(architecture):
        kernel = inspect._compile(launch, inspect.BASE)
    memory = GlobalMemory()
    for number, array in enumerate([*arrays, scratch]):
        if array is not None and array.size:
            memory.add(array, f"array {number}")
    values = [(value, kind) for value, kind in _flat(launch, kernel) if kind != "constexpr"]
    bits = [_bits(value, kind, arrays, scratch) for value, kind in values] + [0, 0]
    grid = (*launch.grid, 1, 1)[:3]
    grid = (grid[0] * launch.ctas, *grid[1:])
    traffic = Traffic()
    run = Launch(Program(kernel.asm["ptx"]), grid, 32 * launch.warps, bits, memory, kernel.metadata.shared, launch.ctas,
                 traffic, most=MOST)  # fmt: skip
    try:
        run.run()
    except Findings as findings:  # of zeros, or of what the blocks that are left out would have left
        print(findings, file=sys.stderr)
    total = grid[0] * grid[1] * grid[2]
    resources = Resources(32 * launch.warps, inspect._report(kernel).registers, kernel.metadata.shared)
    return traffic, len(run.blocks()) / total, total, resources


def _flat(launch, kernel):
    """The arguments with the types that they were compiled for, tuples spread."""
    for name, kind in zip(launch.kernel.arg_names, kernel.src.signature.values(), strict=True):
        value = launch.arguments[name]
        yield from zip(value, kind, strict=True) if isinstance(kind, tuple) else [(value, kind)]


def _bits(value, kind, arrays, scratch):
    if isinstance(value, Operand):
        return arrays[value.number].ctypes.data
    if isinstance(value, Scratch):
        return scratch.ctypes.data + value.offset
    if kind == "fp64":
        return int(np.float64(value).view(np.uint64))
    if isinstance(value, float):
        return int(np.float32(value).view(np.uint32))
    return int(value or 0) & (2**64 - 1)


if __name__ == "__main__":
    main()
