"""torch.onnx.export by both exporters, torch.export alone, torch.jit.trace: plain ONNX, with the same numbers."""

from pathlib import Path

import numpy as np
import pytest

import opgrad
from opgrad.ops import operators

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import opgrad.onnxruntime  # noqa: E402
import opgrad.torch  # noqa: E402

# PyTorch's exporters warn of themselves; what a trace would get wrong stays an error.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error::torch.jit.TracerWarning"),
]
PLAIN = ["Gather", "Relu", "LeakyRelu", "Mul", "Sigmoid", "Mul", "Mul", "Sigmoid", "Tanh", "Sigmoid", "Softmax"]
PLAIN += ["LogSoftmax", "LogSoftmax", "SoftmaxCrossEntropyLoss", "Gather"]
SHAPING = {"Reshape", "Shape", "Slice", "Concat", "Constant", "Gemm", "MatMul", "Transpose", "Add", "Cast", "Identity"}


class Model(torch.nn.Module):
    """Every function of opgrad.torch, on a table and a layer that are trained."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(9, 4, dtype=dtype))
        self.layer = torch.nn.Linear(4, 5, dtype=dtype)

    def forward(self, indices, labels):
        x = opgrad.torch.embedding(indices, self.table, padding_idx=3)
        x = opgrad.torch.leaky_relu(opgrad.torch.relu(x), 0.1)
        x = opgrad.torch.quick_gelu(opgrad.torch.quick_gelu(x), 1.0)
        y = opgrad.torch.sigmoid(opgrad.torch.tanh(self.layer(x)))
        rows = opgrad.torch.softmax(y), opgrad.torch.log_softmax(y, 0), opgrad.torch.log_softmax(y, (0, 1))
        return *rows, opgrad.torch.cross_entropy(y, labels), opgrad.torch.gather(y, labels, 1)


def inputs(size):
    generator = torch.Generator().manual_seed(size)
    table, classes = torch.arange(-9, 9), torch.arange(5)
    return tuple(each[torch.randint(len(each), (size,), generator=generator)] for each in (table, classes))


def exported(model, arguments, path, dynamo, opset):
    """Export with a number of rows that may change, and check the file."""
    names = ["a", "b"]
    if dynamo:
        rows = torch.export.Dim("rows", min=2)
        options = {"dynamic_shapes": [{0: rows}, {0: rows}], "verbose": False}
    else:
        options = {"dynamic_axes": {name: {0: "rows"} for name in names}}
    torch.onnx.export(model, arguments, path, dynamo=dynamo, input_names=names, opset_version=opset, **options)
    found = onnx.load(path)
    onnx.checker.check_model(found, full_check=True)
    assert next(each.version for each in found.opset_import if not each.domain) == opset
    return found


def run(path, arguments, options=None):
    session = onnxruntime.InferenceSession(path, options)
    return session.run(None, {name: each.numpy() for name, each in zip("ab", arguments, strict=True)})


def assert_alike(ours, theirs, dtype):
    """Equal up to the rounding of a few operations on numbers near 1, and of a sum of 35."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == tuple(other.shape)
        expected = other.detach().double().numpy()
        np.testing.assert_allclose(mine.astype(np.float64), expected, rtol=0, atol=35 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("dynamo", "opset", "dtype"),
    [
        (True, 18, torch.float32),
        (True, 23, torch.float16),
        (False, 13, torch.float32),
        (False, 17, torch.float16),
        (False, 20, torch.float32),
    ],
)
@pytest.mark.one_in(2)
def test_models(dynamo, opset, dtype, tmp_path):
    model, path = Model(dtype).eval(), str(tmp_path / "model.onnx")
    found = exported(model, inputs(3), path, dynamo, opset)
    assert sorted(node.op_type for node in found.graph.node if node.op_type not in SHAPING) == sorted(PLAIN)
    assert {node.domain for node in found.graph.node} <= {"", "ai.onnx"}
    for size in (3, 7):
        assert_alike(run(path, inputs(size)), model(*inputs(size)), dtype)


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Buffer(torch.tensor([0.5, 1, 2, 1, 3], dtype=torch.float64))

    def forward(self, x, labels):
        weight = self.weight
        sums = opgrad.torch.cross_entropy(x.half(), labels, weight.half(), ignore_index=2, reduction="sum")
        options = {"weight": weight, "ignore_index": 1, "out_dtype": (torch.float64, None)}
        loss, log_prob = opgrad.softmax_cross_entropy_loss(x, labels, reduction="none", **options)
        only = opgrad.softmax_cross_entropy_loss_only(x, labels, weight, out_dtype=torch.float16)
        return sums, loss, log_prob, only


@pytest.mark.parametrize("dynamo", [True, False])
def test_losses_of_several_dtypes(dynamo, tmp_path):
    path, arguments = str(tmp_path / "model.onnx"), (torch.randn(4, 5), torch.tensor([0, 1, 2, 4]))
    exported(Loss(), arguments, path, dynamo, 18)
    ours, theirs = run(path, arguments), Loss()(*arguments)
    assert [mine.dtype.name for mine in ours] == ["float16", "float64", "float32", "float16"]
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other.numpy(), rtol=4 * np.finfo(np.float16).eps, atol=1e-6)


class Gradients(torch.nn.Module):
    """Operators that only training graphs have; a loss with its gradient becomes a node for each."""

    def forward(self, x, labels):
        dy, y = 2 * x, opgrad.softmax(x)
        options = {"ignore_index": 3, "out_dtype": torch.float64}
        return (
            opgrad.softmax_grad(dy, y),
            opgrad.log_softmax_grad(dy, y, (0, 1)),
            opgrad.relu_grad(dy, x),
            opgrad.sigmoid_grad(dy, y),
            opgrad.tanh_grad(dy, y),
            opgrad.quick_gelu_grad(dy, x, 1.0),
            opgrad.leaky_relu_grad(dy, y, 0.1),
            opgrad.gather_grad((9, 5), labels, x),
            opgrad.softmax_cross_entropy_loss_grad(x.sum(), y, labels, **options),
            *opgrad.softmax_cross_entropy_loss_and_grad(x, labels),
            opgrad.scale(x, x.sum()),
            opgrad.in_place_accumulator(x, dy.double()),
        )


@pytest.mark.parametrize("dynamo", [True, False])
def test_gradient_operators_keep_their_original_names(dynamo, tmp_path):
    path, model = str(tmp_path / "model.onnx"), Gradients()
    found = exported(model, (torch.randn(3, 5), torch.arange(3)), path, dynamo, 18)
    names = {node.op_type for node in found.graph.node if node.domain == "com.microsoft"}
    expected = {name.name for op in operators().values() if op.name.endswith("_grad") for name in op.onnx[-1:]}
    others = {"SoftmaxGrad", "LogSoftmaxGrad", "SoftmaxCrossEntropyLossAndGrad"}
    assert names == (expected - others) | {"SoftmaxGrad_13", "LogSoftmaxGrad_13", "Scale"}
    options = onnxruntime.SessionOptions()
    opgrad.onnxruntime.register(options)
    arguments = torch.randn(4, 5), torch.tensor([4, 0, 3, 3])
    for mine, other in zip(run(path, arguments, options), model(*arguments), strict=True):
        np.testing.assert_allclose(mine, other.numpy(), rtol=1e-5, atol=1e-5)


def test_every_operator_has_a_form():
    from opgrad.torch import export

    assert all(name in export.FORMS or op.onnx for name, op in operators().items())


def test_exported_programs(tmp_path):
    """torch.export keeps the operators; one line makes them ONNX's."""
    from opgrad.torch.export import decompositions

    rows = torch.export.Dim("rows", min=2)
    model, path = Model().eval(), str(tmp_path / "model.onnx")
    program = torch.export.export(model, inputs(3), dynamic_shapes=[{0: rows}, {0: rows}])
    kept = {str(node.target) for node in program.graph.nodes}
    assert {"opgrad.softmax.default", "opgrad.gather.default"} <= kept
    program = program.run_decompositions(decompositions())
    torch.onnx.export(program, f=path, input_names=["a", "b"], opset_version=18, verbose=False)
    assert_alike(run(path, inputs(7)), model(*inputs(7)), torch.float32)


def test_results_stay_on_the_device_of_their_arguments():
    class Sum(torch.nn.Module):
        def forward(self, x):
            return opgrad.torch.tanh(x) + x

    program = torch.onnx.export(Sum(), (torch.empty(3, device="meta"),), dynamo=True, verbose=False)
    assert [node.op_type for node in program.model_proto.graph.node] == ["Tanh", "Add"]


def test_the_example_of_the_documentation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "guides" / "pytorch.md").read_text(encoding="utf-8")
    _, _, example = text.partition("## ONNX")[2].partition("```py\n")
    exec(example.partition("```")[0], {"torch": torch, "opgrad": opgrad})
    found = onnx.load(tmp_path / "classifier.onnx")
    assert [node.op_type for node in found.graph.node] == ["Mul", "Sigmoid", "Mul", "Softmax"]


# --- traces ---------------------------------------------------------------------------------------------------------


def with_gradient(model, arguments, table):
    table.grad = None
    results = model(*arguments)
    sum(result.sum() for result in results).backward()
    return *(result.detach() for result in results), table.grad


def test_traced_modules(tmp_path):
    model, path = Model(), tmp_path / "model.pt"
    traced = torch.jit.trace(model, inputs(3))
    torch.jit.save(traced, path)
    loaded = torch.jit.load(path)
    for size in (3, 7):
        expected = with_gradient(model, inputs(size), model.table)
        torch.testing.assert_close(with_gradient(traced, inputs(size), model.table), expected)
        torch.testing.assert_close(with_gradient(loaded, inputs(size), loaded.table), expected)
    exported(loaded, inputs(3), str(tmp_path / "model.onnx"), dynamo=False, opset=17)
    assert_alike(run(str(tmp_path / "model.onnx"), inputs(7)), model(*inputs(7)), torch.float32)


def test_sizes_in_a_trace_become_numbers_with_a_warning():
    def gradient(x, indices):
        return opgrad.gather_grad((x.shape[0], 9), indices, x, 1)

    x, indices = torch.randn(2, 3), torch.arange(3)
    with pytest.warns(torch.jit.TracerWarning):
        traced = torch.jit.trace(gradient, (x, indices), check_trace=False)
    torch.testing.assert_close(traced(x, indices), gradient(x, indices))
