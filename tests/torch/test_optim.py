"""Optimizers of sparse gradients beside PyTorch's own, and of bfloat16 weights beside a training in float32."""

import copy
import io

import numpy as np
import pytest
from ml_dtypes import bfloat16

from opgrad import optim as arrays

torch = pytest.importorskip("torch")

import opgrad.torch  # noqa: E402
from opgrad.torch import optim  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # PyTorch's own, of its optimizers
KINDS = {"SparseSGD": torch.optim.SGD, "SparseAdagrad": torch.optim.Adagrad, "SparseAdam": torch.optim.SparseAdam}


def backward(table, step, twice=False):
    table.grad = None
    for part in range(1 + twice):
        indices = torch.arange(step + part, step + part + 9) // 2
        opgrad.torch.embedding(indices, table, sparse=True).pow(2).sum().backward()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_steps_are_pytorchs(name, dtype, twice):
    """Rows that no batch names stay as they are; gradients of two backward passes are added up."""
    start = torch.randn(40, 5, 2, dtype=dtype)
    tables = [torch.nn.Parameter(start.clone()) for _ in "12"]
    both = [kind([table], lr=0.1) for kind, table in zip((getattr(optim, name), KINDS[name]), tables, strict=True)]
    for step in (0, 7, 3):
        for table, optimizer in zip(tables, both, strict=True):
            backward(table, step, twice)
            optimizer.step()
    tolerance = {torch.bfloat16: 2**-5, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(*tables, rtol=tolerance, atol=tolerance)
    assert torch.equal(tables[0][20:], start[20:])


def test_sparse_state_is_that_of_pytorch():
    """A checkpoint of torch.optim.SparseAdam is gone on with."""
    tables = [torch.nn.Parameter(torch.ones(40, 5)) for _ in "12"]
    first, other = torch.optim.SparseAdam([tables[1]], lr=0.1), optim.SparseAdam([tables[0]], lr=0.1)
    backward(tables[1], 2)
    first.step()
    other.load_state_dict(copy.deepcopy(first.state_dict()))
    tables[0].data.copy_(tables[1])
    for table, optimizer in zip(tables, (other, first), strict=True):
        backward(table, 4)
        optimizer.step()
    torch.testing.assert_close(*tables)


def split_and_whole(name):
    """A split optimizer of a parameter, and the array form of the same rule."""
    parameter = torch.nn.Parameter(torch.randn(30, 7).bfloat16())
    upper, slope = parameter.detach().float().numpy().reshape(-1).astype(bfloat16), np.zeros(210, bfloat16)
    return parameter, getattr(optim, name)([parameter], lr=1e-3), getattr(arrays, name)(upper, slope, 1e-3), slope


@pytest.mark.parametrize("name", ["SplitSGD", "SplitAdamW"])
@pytest.mark.parametrize("moved", [False, True])
def test_split_weights_are_those_of_float32(name, moved):
    """As for arrays, bit by bit; a parameter and its gradient may get other memory between steps."""
    parameter, optimizer, expected, slope = split_and_whole(name)
    assert torch.equal(optimizer.weights(parameter), parameter.detach().float())
    for _ in range(20):
        parameter.grad = torch.randn(7, 30).bfloat16().t()
        slope[...] = parameter.grad.float().numpy().reshape(-1)
        if moved:
            parameter.data = parameter.data.clone()
        optimizer.step()
        expected.step()
    assert optimizer.weights(parameter).numpy().tobytes() == expected.weights().tobytes()
    assert not torch.equal(optimizer.weights(parameter), parameter.detach().float())


def test_split_adamw_is_near_pytorchs_in_float32():
    parameter, optimizer, _, _ = split_and_whole("SplitAdamW")
    wide = torch.nn.Parameter(parameter.detach().float())
    theirs = torch.optim.AdamW([wide], lr=1e-3)
    for _ in range(50):
        parameter.grad = torch.randn(30, 7).bfloat16()
        wide.grad = parameter.grad.float()
        optimizer.step()
        theirs.step()
    torch.testing.assert_close(optimizer.weights(parameter), wide.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["SplitSGD", "SplitAdamW"])
def test_split_optimizers_are_saved_with_all_bits(name):
    """And go on alike, though the decay of the weights is another from then on."""
    parameter, optimizer, _, _ = split_and_whole(name)

    def steps(parameter, optimizer, count):
        generator = torch.Generator().manual_seed(count)
        for _ in range(count):
            parameter.grad = torch.randn(30, 7, generator=generator).bfloat16()
            optimizer.step()

    steps(parameter, optimizer, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = torch.nn.Parameter(parameter.detach().clone())
    second = getattr(optim, name)([other])
    second.load_state_dict(torch.load(file))
    assert second.state[other]["low"].dtype == torch.int16
    for each in (optimizer, second):
        each.param_groups[0].update({"weight_decay": 0.3} if name == "SplitAdamW" else {"lr": 0.5})
    for each, of in ((optimizer, parameter), (second, other)):
        steps(of, each, 4)
    assert torch.equal(optimizer.weights(parameter), second.weights(other))
    assert torch.equal(copy.deepcopy(second).state_dict()["state"][0]["low"], second.state[other]["low"])


@pytest.mark.parametrize(
    ("name", "parameter", "gradient", "message"),
    [
        ("SplitSGD", torch.ones(4), None, "a parameter is torch.float32, expected torch.bfloat16"),
        ("SparseSGD", torch.ones(4, dtype=torch.int64), None, "a parameter is torch.int64, expected"),
        ("SparseSGD", torch.ones(4, 3).t(), None, "a parameter is strided or sparse"),
        ("SparseAdam", torch.ones(4, device="meta"), None, "a parameter is a Tensor on meta"),
        ("SparseAdam", torch.ones(4, 2), torch.ones(4, 2), "a gradient is torch.strided, expected a sparse one"),
        ("SplitSGD", torch.ones(4).bfloat16(), torch.ones(4).bfloat16().to_sparse(), "expected a dense one of"),
    ],
)  # fmt: skip
def test_what_optimizers_refuse(name, parameter, gradient, message):
    """Nothing is changed, of other parameters neither."""

    def train():
        optimizer = getattr(optim, name)([parameter])
        parameter.grad = gradient
        optimizer.step()

    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*{message}"):
        train()
    assert parameter.is_meta or bool((parameter == 1).all())


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": float("nan")}])
def test_settings_that_are_refused(options):
    with pytest.raises(ValueError, match=f"^SparseAdam: {next(iter(options))} is"):
        optim.SparseAdam([torch.ones(3, 2)], **options)


def test_autograd_knows_of_a_step():
    """A graph that has kept the table refuses to go on after it."""
    table = torch.nn.Parameter(torch.ones(4, 2))
    kept = table.pow(2).sum()
    optimizer = optim.SparseSGD([table])
    opgrad.torch.embedding(torch.tensor([1]), table, sparse=True).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
