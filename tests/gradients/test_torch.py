"""Models exported by PyTorch, by both of its exporters: the gradients of all parameters are those of its autograd."""

import numpy as np
import onnxruntime
import pytest

from opgrad.gradients import gradients

torch = pytest.importorskip("torch")
architectures = pytest.importorskip("architectures")
MODELS = {each.__name__: each for each in architectures.MODELS}


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
    model, given = MODELS[name](), MODELS[name].example
    with torch.no_grad():
        factors = torch.randn(model(*given).shape, generator=torch.Generator().manual_seed(5))
    return Weighed(model), (factors, *given)


def compare(whole, given, model):
    """The gradients of all parameters of the exported model, in stock onnxruntime, with those of autograd."""
    loss = whole(*given)
    loss.backward()
    known = {each.name for each in model.graph.initializer}
    parameters = {name: each.grad for name, each in whole.named_parameters(remove_duplicate=False) if name in known}
    assert len(parameters) == len(list(whole.parameters()))  # shared ones have one of their names
    names = list(parameters)
    graph = gradients(model, model.graph.output[0].name, names, plain=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options)
    inputs = [each.name for each in model.graph.input if each.name not in known]
    results = session.run(None, dict(zip(inputs, (each.numpy() for each in given), strict=True)))
    np.testing.assert_allclose(results[0], loss.detach().numpy(), rtol=1e-4, atol=1e-4)
    largest = max(each.abs().max().item() for each in parameters.values())
    for name, found in zip(names, results[-len(names) :], strict=True):
        expected = parameters[name].numpy()
        np.testing.assert_allclose(
            found, expected, atol=1e-4 * max(np.abs(expected).max(), 0.01 * largest), err_msg=name
        )


# What is open beside the batch: heights and widths of images, lengths of texts.
OPEN = {
    **dict.fromkeys(("ResNet18", "MobileNetV2", "ConvNeXt", "UNet", "BilinearUNet"), (0, 2, 3)),
    **dict.fromkeys(("Bert", "GPT2", "Text", "GatedText"), (0, 1)),
}


# Those that are exported with sizes that are known, too, in the first opset in which PyTorch writes them.
EARLY = {**dict.fromkeys(("Perceptron", "Convolutional", "UNet", "Bert", "GPT2", "Text", "Recommender"), 12), "ViT": 14}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_old_exporter(name):
    whole, given = weighed(name)
    compare(whole, given, architectures.exported(whole, given, 17, axes=OPEN.get(name, (0,))))
    if name in EARLY:
        whole.zero_grad()
        compare(whole, given, architectures.exported(whole, given, EARLY[name]))


@pytest.mark.parametrize(("name", "opset"), [("ViT", 23), ("GPT2", 18), ("BilinearUNet", 18)])
@pytest.mark.filterwarnings("ignore")
def test_models_of_the_new_exporter(name, opset):
    pytest.importorskip("onnxscript")
    whole, given = weighed(name)
    model = architectures.exported(whole, given, opset, dynamo=True)
    assert opset < 23 or "Attention" in {node.op_type for node in model.graph.node}
    compare(whole, given, model)
