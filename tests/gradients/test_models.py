"""Whole models, also as PyTorch's exporters write them: gradients and twenty steps beside PyTorch's."""

import numpy as np
import pytest
from differences import computed

from opgrad.gradients import gradients
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.artifacts import LossType, generate_artifacts
from opgrad.training.onnxblock import optim

torch = pytest.importorskip("torch")


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
    optimizer, losses = theirs(list(whole.parameters())), []
    whole.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        result = whole(*given)
        loss = result if len(given) > 1 else torch.nn.functional.cross_entropy(result, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(found, losses, rtol=2e-4)
    assert found[-1] < found[0]


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
    **dict.fromkeys(("MobileNetV2", "UNet", "BilinearUNet"), (0, 2, 3)),
    **dict.fromkeys(("Bert", "GPT2", "Text", "GatedText"), (0, 1)),
}


# Those that are exported with sizes that are known, too, in the first opset in which PyTorch writes them.
EARLY = {**dict.fromkeys(("Perceptron", "Convolutional", "UNet", "Bert", "GPT2", "Text", "Recommender"), 12), "ViT": 14}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.one_in(2)
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
