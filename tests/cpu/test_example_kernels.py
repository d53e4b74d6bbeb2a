"""The kernels that `opgrad compile` takes from examples, which depend on the instruction set."""

import pytest

from bench.cells import WORKLOADS
from opgrad.cli import compile as compiling
from opgrad.cli.examples.arguments import SHAPES, signature
from opgrad.contract import FLOATS
from opgrad.cpu.compiler import decorators
from opgrad.cpu.plans import plan


@pytest.mark.parametrize("dtype", FLOATS)
def test_examples_take_every_kernel_that_the_benchmark_takes(op, dtype, monkeypatch):
    taken = set()
    monkeypatch.setattr(decorators.Kernel, "task", lambda self, *key: taken.add((self, *map(tuple, key))) or 0)
    compiling.compile_operator(op.name, dtype)
    small = set(taken)
    for workload in WORKLOADS[op.kind]:
        options = dict(workload.attributes) | ({"indices": (workload.indices,)} if workload.indices else {})
        plan(op, *signature(op, workload.shape, dtype, **options))
    assert taken == small
    assert len(SHAPES[op.kind]) > 1
