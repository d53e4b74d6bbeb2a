"""Models that artifacts are made of in the tests, and runs of what was made."""

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper, parser

import opgrad.onnxruntime
from opgrad.training import ArtifactSet
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

LABELS = np.array([0, 1, 2, 2, 1, 0])


def set_of(model, folder, loss=LossType.CrossEntropyLoss, optimizer=OptimType.SGD, **options):
    """The artifact set of a model, in a folder that is made for it."""
    folder.mkdir(exist_ok=True)
    generate_artifacts(model, loss=loss, optimizer=optimizer, artifact_directory=folder, **options)
    return ArtifactSet.load(folder)


def build(text, weights=(), opset=17, domains=""):
    """A model of this text, with these initializers; its nodes are named n0, n1, …"""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}{domains}]>\n{text}')
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in dict(weights).items())
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
    return model


def normal(seed=0, dtype=np.float32, **shapes):
    """Arrays of random numbers by name."""
    random = np.random.default_rng(seed)
    return {name: (random.standard_normal(shape) * 0.4).astype(dtype) for name, shape in shapes.items()}


def perceptron(opset=17):
    """Scores of three classes for rows of four numbers."""
    text = """g (float[batch, 4] x) => (float[batch, 3] scores) {
        h = Gemm(x, w0, b0)  a = Relu(h)  m = MatMul(a, w1)  scores = Add(m, b1)
    }"""
    return build(text, normal(w0=(4, 5), b0=(5,), w1=(5, 3), b1=(3,)), opset)


def two_outputs():
    """The same, with what is inside as a second output."""
    text = """g (float[batch, 4] x) => (float[batch, 3] scores, float[batch, 5] hidden) {
        hidden = Gemm(x, w0, b0)  a = Tanh(hidden)  m = MatMul(a, w1)  scores = Add(m, b1)
    }"""
    return build(text, normal(w0=(4, 5), b0=(5,), w1=(5, 3), b1=(3,)))


def images(training=False):
    """Scores of three classes for images, with a batch normalization that trains or does not."""
    outputs = "n, new_mean, new_var" if training else "n"
    text = f"""g (float[4, 2, 6, 6] x) => (float[4, 3] scores) {{
        c = Conv<pads = [1, 1, 1, 1]>(x, w0)
        {outputs} = BatchNormalization<training_mode = {int(training)}>(c, scale, bias, mean, var)
        a = Relu(n)  p = GlobalAveragePool(a)  f = Flatten(p)  scores = MatMul(f, w1)
    }}"""
    weights = normal(w0=(4, 2, 3, 3), scale=(4,), bias=(4,), w1=(4, 3))
    return build(text, {**weights, "mean": np.full(4, 0.1, np.float32), "var": np.full(4, 2, np.float32)})


def gradients_of(path):
    """A training model's loss and gradients, without what adds them up."""
    model = onnx.load(path)
    graph, kept = model.graph, [node for node in model.graph.node if node.op_type != "InPlaceAccumulatorV2"]
    names = [node.input[1] for node in graph.node if node.op_type == "InPlaceAccumulatorV2"]
    inputs = [each for each in graph.input if not each.name.endswith("accumulation.buffer")]
    inputs = [each for each in inputs if each.name != "lazy_reset_grad"]
    outputs = [graph.output[0], *(onnx.ValueInfoProto(name=name) for name in names)]
    new = onnx.helper.make_graph(kept, "gradients", inputs, outputs, graph.initializer, value_info=graph.value_info)
    return onnx.helper.make_model(new, opset_imports=model.opset_import, ir_version=model.ir_version)


def run(model, feeds):
    """The results of a model or of a file, with opgrad's operators."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return opgrad.onnxruntime.InferenceSession(source, options).run(None, feeds)
