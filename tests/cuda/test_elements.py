"""Operators on single elements on CUDA: rows that lie apart, accuracy, the options that only they have."""

import numpy as np
import pytest
from element_cases import optional_calls
from relayouts import relaid, spaced_rows
from samples import bits, cast, elements, sample

from opgrad.ops import operators

pytest.importorskip("triton", reason="needs Triton")

from cuda_backend import FROM_PTX, ON_GPU, call, check, for_kernels, forget, program

pytestmark = [pytest.mark.gpu] if ON_GPU else []


@for_kernels(lambda op: op.kind == "elements")
def test_rows_of_elements(op, dtype, rng):
    """Rows apart from each other: in whole vectors, in shorter ones, and with an end that is none."""
    for shape, gap in [((5, 64), 8), ((5, 12), 4), ((3, 67), 5), ((40, 3), 2), ((3, 1040), 16), ((2, 1031), 9)]:
        arguments = sample(op, shape, dtype, rng)
        for name in elements(op, arguments):
            wide = np.zeros((shape[0], shape[1] + gap), dtype=arguments[name].dtype)
            wide[:, : shape[1]] = arguments[name]
            arguments[name] = wide[:, : shape[1]]
        assert program(op, arguments).regime == "rows"
        check(op, arguments, str(shape))


@for_kernels(lambda op: op.kind == "elements")
def test_64_bit_positions(op, dtype, rng, monkeypatch):
    from opgrad.cuda import elements as frame

    monkeypatch.setattr(frame, "REACH", 0)
    forget()
    check(op, sample(op, (2051,), dtype, rng))
    check(op, relaid(arguments := sample(op, (5, 12), dtype, rng), spaced_rows, list(arguments)))
    forget()


def test_options(dtype, rng):
    for op, arguments, note in optional_calls(dtype, rng):
        check(op, arguments, note)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_few_units_in_the_last_place(name, dtype):
    """Where the exact function cancels, between its two formulas, in its tails, and at denormal results."""
    sizes = np.concatenate([np.logspace(-320, -2, 400), np.linspace(0.01, 1.25, 800), np.linspace(1.25, 104, 800)])
    x = cast(np.concatenate([sizes, -sizes]), dtype)
    wide = x.astype(np.longdouble)
    exact = np.tanh(wide) if name == "tanh" else 1 / (1 + np.exp(-wide))
    (result,) = call(operators()[name], {"x": x})
    spacing = np.spacing(np.abs(exact).astype(dtype)).astype(np.longdouble)
    # ex2.approx is off by up to 2^-22, four units below a power of two, and is squared where float32 could not hold the
    # result of one; eight roundings of half a unit and more are on the way. NumPy's, in the interpreter, errs by less.
    assert (np.abs(result - exact) / spacing).max() < (16 if ON_GPU or FROM_PTX else 8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scaling_down_is_division(dtype, rng):
    x, factor = cast(rng.normal(size=300), dtype), np.array(3.7, dtype)
    (result,) = call(operators()["scale"], {"x": x, "factor": factor, "scale_down": True})
    assert bits(result) == bits(x / factor)


@pytest.mark.gpu
def test_more_than_31_bits_of_positions():
    import torch

    import opgrad

    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GiB of free device memory")
    x = torch.zeros(2**31 + 4099, dtype=torch.bfloat16, device="cuda")
    places = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**31 + 5, len(x) - 1], device="cuda")
    x[places] = torch.tensor([-1.0, 2, 3, -4, 5, 6], dtype=x.dtype, device="cuda")
    opgrad.relu(x, out=x)
    assert x[places].tolist() == [0, 2, 3, 0, 5, 6]
    assert torch.count_nonzero(x) == 4
