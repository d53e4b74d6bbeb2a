"""Whole models, also as PyTorch's exporters write them: gradients and twenty steps beside PyTorch's."""

import numpy as np
import pytest
from differences import computed
from gradient_cases import numbers
from passes_cases import build, run

from opgrad.gradients import gradients
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.artifacts import LossType, generate_artifacts
from opgrad.training.onnxblock import optim

torch = pytest.importorskip("torch")


def weights(**shapes):
    """Float32 weights of these shapes."""
    return {
        name: (0.5 * numbers(*shape, seed=place)).astype(np.float32)
        for place, (name, shape) in enumerate(shapes.items())
    }


def compare(model, feeds, parameters, loss):
    """The gradients with respect to parameters and float feeds, with kernels and plain, and PyTorch's."""
    floats = {name: array for name, array in feeds.items() if array.dtype == np.float32}
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in {**parameters, **floats}.items()}
    tensors |= {name: torch.tensor(array) for name, array in feeds.items() if name not in floats}
    value = loss(**tensors)
    value.backward()
    names = [*parameters, *floats]
    for plain in (False, True):
        results = run(gradients(model, "loss", names, plain=plain), feeds)
        np.testing.assert_allclose(results[0], value.detach().numpy(), rtol=1e-4)
        for name, gradient in zip(names, results[-len(names) :], strict=True):
            expected = tensors[name].grad.numpy()
            np.testing.assert_allclose(gradient, expected, atol=1e-4 * max(np.abs(expected).max(), 1), err_msg=name)


def test_a_perceptron_of_any_batch_size():
    parameters = weights(w0=(4, 5), b0=(5,), w1=(5, 3), b1=(3,))
    model = build(
        """g (float[batch, 4] x, int64[batch] labels) => (float loss) {
            h = Gemm(x, w0, b0)
            a = Relu(h)
            y = MatMul(a, w1)
            scores = Add(y, b1)
            loss = SoftmaxCrossEntropyLoss(scores, labels)
        }""",
        parameters,
    )

    def loss(x, labels, w0, b0, w1, b1):
        return torch.nn.functional.cross_entropy(torch.relu(x @ w0 + b0) @ w1 + b1, labels)

    x = numbers(6, 4).astype(np.float32)
    compare(model, {"x": x, "labels": np.array([0, 2, 1, 1, 0, 2])}, parameters, loss)


def test_a_convolutional_net():
    parameters = weights(w0=(4, 2, 3, 3), b0=(4,), scale=(4,), bias=(4,), w1=(4, 2, 3, 3), w2=(16, 3))
    model = build(
        """g (float[batch, 2, 8, 8] x) => (float loss) {
            c0 = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
            n0, m, v = BatchNormalization <training_mode = 1> (c0, scale, bias, mean, var)
            a0 = Relu(n0)
            p0 = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a0)
            c1 = Conv <pads = [1, 1, 1, 1], group = 2> (p0, w1)
            s1 = Sigmoid(c1)
            a1 = Mul(c1, s1)
            p1 = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (a1)
            f = Flatten(p1)
            y = MatMul(f, w2)
            q = Mul(y, y)
            loss = ReduceMean <keepdims = 0> (q)
        }""",
        {**parameters, "mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)},
    )

    def loss(x, w0, b0, scale, bias, w1, w2):
        f = torch.nn.functional
        y = f.batch_norm(f.conv2d(x, w0, b0, padding=1), None, None, scale, bias, training=True)
        y = f.conv2d(f.max_pool2d(torch.relu(y), 2), w1, padding=1, groups=2)
        return ((f.avg_pool2d(f.silu(y), 2).flatten(1) @ w2) ** 2).mean()

    compare(model, {"x": numbers(3, 2, 8, 8).astype(np.float32)}, parameters, loss)


TRANSFORMER = """g (int64[batch, length] tokens) => (float loss) {
    x = Gather(table, tokens)
    n = LayerNormalization <axis = -1> (x, scale, bias)
    m = MatMul(n, qkv)
    h = Reshape(m, heads)
    t = Transpose <perm = [2, 0, 3, 1, 4]> (h)
    q = Gather(t, zero)
    k = Gather(t, one)
    v = Gather(t, two)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s = MatMul(q, kt)
    r = Mul(s, root)
    p = Softmax <axis = -1> (r)
    c = MatMul(p, v)
    ct = Transpose <perm = [0, 2, 1, 3]> (c)
    cm = Reshape(ct, merged)
    o = MatMul(cm, out)
    x1 = Add(x, o)
    u = MatMul(x1, up)
    a = com.microsoft.Gelu(u)
    d = MatMul(a, down)
    x2 = Add(x1, d)
    tt = Transpose <perm = [1, 0]> (table)
    logits = MatMul(x2, tt)
    labels = Reshape(tokens, minus)
    rows = Reshape(logits, flat7)
    loss = SoftmaxCrossEntropyLoss(rows, labels)
}"""


def test_a_transformer_block():
    parameters = weights(table=(7, 8), scale=(8,), bias=(8,), qkv=(8, 24), out=(8, 8), up=(8, 16), down=(16, 8))
    shapes = {"heads": np.array([0, 0, 3, 2, 4]), "merged": np.array([0, 0, 8])}
    index = {"zero": np.array(0), "one": np.array(1), "two": np.array(2), "root": np.float32(0.5)}
    model = build(TRANSFORMER, {**parameters, **shapes, **index, "minus": np.array([-1]), "flat7": np.array([-1, 7])})

    def loss(tokens, table, scale, bias, qkv, out, up, down):
        f = torch.nn.functional
        x = table[tokens]
        h = (f.layer_norm(x, (8,), scale, bias) @ qkv).reshape(*tokens.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = h
        c = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v
        x = x + c.transpose(1, 2).reshape(*tokens.shape, 8) @ out
        x = x + f.gelu(x @ up) @ down
        return f.cross_entropy((x @ table.T).reshape(-1, 7), tokens.reshape(-1))

    compare(model, {"tokens": np.array([[0, 3, 3, 6], [5, 1, 2, 2]])}, parameters, loss)


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
ORDER = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 2, 3, 1]}  # of the gates of PyTorch among those of ONNX


def recurrent(op, hidden, directions, lengths, parameters, shape):
    """A model of one layer, whose loss is the sum of the squares of all its results."""
    outputs = ["y", "h"] + (["c"] if op == "LSTM" else [])
    more = ", linear_before_reset = 1" if op == "GRU" else ""
    direction = "bidirectional" if directions == 2 else "forward"
    names = ["x", "w", "r", "b", "lengths" if lengths else "", *(name for name in parameters if name.endswith("0"))]
    squares = "  ".join(f"{each}s = ReduceSumSquare <keepdims = 0> ({each})" for each in outputs)
    constants = {**parameters, **({"lengths": np.array(lengths, np.int32)} if lengths else {})}
    text = f"""g (float{list(shape)} x) => (float loss) {{
        {", ".join(outputs)} = {op} <hidden_size = {hidden}, direction = "{direction}"{more}> ({", ".join(names)})
        {squares}  loss = Sum({", ".join(f"{each}s" for each in outputs)}) }}"""
    return build(text, constants)


@pytest.mark.parametrize("lengths", [None, [5, 3, 2]], ids=["full", "lengths"])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("op", GATES)
def test_recurrent_layers(op, directions, lengths):
    gates, hidden, width, batch, steps = GATES[op], 3, 2, 3, 5
    states = {"h0": (directions, batch, hidden)} | ({"c0": (directions, batch, hidden)} if op == "LSTM" else {})
    parameters = weights(
        w=(directions, gates * hidden, width),
        r=(directions, gates * hidden, hidden),
        b=(directions, 2 * gates * hidden),
        **states,
    )
    model = recurrent(op, hidden, directions, lengths, parameters, (steps, batch, width))

    def loss(x, w, r, b, h0, c0=None):
        layer = getattr(torch.nn, op)(width, hidden, bidirectional=directions == 2)
        given = {}
        for index in range(directions):
            suffix = "_l0_reverse" if index else "_l0"
            wb, rb = b[index].split(gates * hidden)
            for name, value in (("weight_ih", w[index]), ("weight_hh", r[index]), ("bias_ih", wb), ("bias_hh", rb)):
                parts = value.split(hidden)
                given[name + suffix] = torch.cat([parts[place] for place in ORDER[op]])
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths) if lengths else x
        state = h0 if c0 is None else (h0, c0)
        y, last = torch.func.functional_call(layer, given, (packed, state))
        y = y.data if lengths else y
        last = last if isinstance(last, tuple) else (last,)
        return (y * y).sum() + sum((each * each).sum() for each in last)

    compare(model, {"x": numbers(steps, batch, width).astype(np.float32)}, parameters, loss)


architectures = pytest.importorskip("architectures")
STEPS = 20


class WithLoss(torch.nn.Module):
    """GPT-2 with its loss, each token predicting the next."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, words, labels):
        scores = self.model(words)
        return torch.nn.functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1))


MODELS = {"images": (architectures.Convolutional, 3, 12), "text": (architectures.GPT2, 13, 17)}
OPTIMIZERS = {
    "AdamW": (optim.AdamW(eps=1e-8), lambda weights: torch.optim.AdamW(weights, 1e-2, weight_decay=0, eps=1e-8)),
    "SGD": (optim.SGD(), lambda weights: torch.optim.SGD(weights, 1e-2)),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_losses_follow_those_of_pytorch(kind, optimizer, tmp_path):
    make, classes, opset = MODELS[kind]
    torch.manual_seed(0)
    model, (x,) = make(), make.example
    labels = torch.randint(
        0, classes, x.shape[: 2 if kind == "text" else 1], generator=torch.Generator().manual_seed(6)
    )
    whole = WithLoss(model) if kind == "text" else model
    given = (x, labels) if kind == "text" else (x,)
    ours, theirs = OPTIMIZERS[optimizer]
    exported = architectures.exported(whole, given, opset)
    loss = None if kind == "text" else LossType.CrossEntropyLoss
    made = generate_artifacts(exported, loss=loss, optimizer=ours, artifact_directory=tmp_path)
    assert len(made.trainable) == len(list(whole.parameters()))
    trainer = Trainer(ArtifactSet.load(tmp_path), 1e-2)
    batch = dict(zip(made.inputs, (x.numpy(), labels.numpy()), strict=True))
    found = [trainer.step(batch) for _ in range(STEPS)]
    np.testing.assert_allclose(found, torch_losses(whole, theirs(list(whole.parameters())), given, labels), rtol=2e-4)
    assert found[-1] < found[0]


def torch_losses(whole, optimizer, given, labels):
    """The losses of the same steps in PyTorch."""
    losses = []
    whole.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = whole(*given)
        loss = result if len(given) > 1 else torch.nn.functional.cross_entropy(result, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


ARCHITECTURES = {each.__name__: each for each in architectures.MODELS}


class Weighed(torch.nn.Module):
    """A model with one number as its result: the sum of what it gives, times factors."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, factors, *given):
        return (self.model(*given) * factors).sum()


def weighed(name):
    """A model, its arguments, and the gradients of its parameters in PyTorch."""
    torch.manual_seed(0)
    model, given = ARCHITECTURES[name](), ARCHITECTURES[name].example
    with torch.no_grad():
        factors = torch.randn(model(*given).shape, generator=torch.Generator().manual_seed(5))
    return Weighed(model), (factors, *given)


def compare_exported(whole, given, model):
    """The gradients of all parameters of the exported model, in stock onnxruntime, with those of autograd."""
    loss = whole(*given)
    loss.backward()
    known = {each.name for each in model.graph.initializer}
    parameters = {name: each.grad for name, each in whole.named_parameters(remove_duplicate=False) if name in known}
    assert len(parameters) == len(list(whole.parameters()))  # shared ones have one of their names
    names = list(parameters)
    graph = gradients(model, model.graph.output[0].name, names, plain=True)
    inputs = [each.name for each in model.graph.input if each.name not in known]
    results = computed(graph, dict(zip(inputs, (each.numpy() for each in given), strict=True)))
    np.testing.assert_allclose(results[0], loss.detach().numpy(), rtol=1e-4, atol=1e-4)
    largest = max(each.abs().max().item() for each in parameters.values())
    for name, found in zip(names, results[-len(names) :], strict=True):
        expected = parameters[name].numpy()
        atol = 1e-4 * max(np.abs(expected).max(), 0.01 * largest)
        np.testing.assert_allclose(found, expected, atol=atol, err_msg=name)


# What is open beside the batch: heights and widths of images, lengths of texts.
OPEN = {
    **dict.fromkeys(("ResNet18", "MobileNetV2", "ConvNeXt", "UNet", "BilinearUNet"), (0, 2, 3)),
    **dict.fromkeys(("Bert", "GPT2", "Text", "GatedText"), (0, 1)),
}


# Those that are exported with sizes that are known, too, in the first opset in which PyTorch writes them.
EARLY = {**dict.fromkeys(("Perceptron", "Convolutional", "UNet", "Bert", "GPT2", "Text", "Recommender"), 12), "ViT": 14}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_the_old_exporter(name):
    whole, given = weighed(name)
    compare_exported(whole, given, architectures.exported(whole, given, 17, axes=OPEN.get(name, (0,))))
    if name in EARLY:
        whole.zero_grad()
        compare_exported(whole, given, architectures.exported(whole, given, EARLY[name]))


@pytest.mark.parametrize(("name", "opset"), [("ViT", 23), ("GPT2", 18), ("BilinearUNet", 18)])
@pytest.mark.filterwarnings("ignore")
def test_models_of_the_new_exporter(name, opset):
    pytest.importorskip("onnxscript")
    whole, given = weighed(name)
    model = architectures.exported(whole, given, opset, dynamo=True)
    assert opset < 23 or "Attention" in {node.op_type for node in model.graph.node}
    compare_exported(whole, given, model)
