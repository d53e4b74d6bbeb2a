"""Make the artifact sets of this folder, and reference.json and gradients.npz for each.

    python generate.py DIGITS [NAME ...]

Needs onnxruntime-training-cpu 1.19.2 (Python 3.8 to 3.12), torch and onnx 1.16; the tests only read what it wrote.
DIGITS is scikit-learn's file sklearn/datasets/data/digits.csv.gz. Without names every set is made.

reference.json holds the losses that onnxruntime-training computed, and says which rows it took; gradients.npz holds
the gradients of the first batch, by parameter. What 1.19.2 demanded of the models:

* Pooling: MaxPoolGrad and AveragePoolGrad learn the shape of their output from the graph, so the whole shape must
  be known there, the batch size too; otherwise the process dies of a division by zero.
* Batch normalization: the evaluation graph must be repaired, see below.
* Dropout: with a ratio of 0 it is removed, see below. Opset 15, so that layer normalization and Gelu are fused from
  their parts with all outputs that their gradients need.
"""

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import onnxruntime.training.api as api
import torch
from old_runtime import one_output_of_normalizations, reference, trained
from onnxruntime.training import artifacts, onnxblock
from torch import nn

FOLDER = Path(__file__).parent
ROWS, TRAINING_ROWS, BATCH, STEPS = 1797, 1500, 50, 20


# --- the models ------------------------------------------------------------------------------------------------------


class DigitsCnn(nn.Module):
    """Two convolutions, batch normalization, both poolings."""

    inputs = ("pixels",)

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 16, 3, padding=1)
        self.classify = nn.Linear(64, 10)

    def forward(self, pixels):
        hidden = nn.functional.max_pool2d(torch.relu(self.norm(self.first(pixels))), 2)
        hidden = nn.functional.avg_pool2d(torch.relu(self.second(hidden)), 2)
        return self.classify(hidden.flatten(1))


class DigitsTransformer(nn.Module):
    """One encoder layer over the 8 rows of a digit, each of 8 tokens."""

    inputs = ("tokens",)

    def __init__(self, size=32, heads=4):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(17, 4)
        self.position = nn.Parameter(torch.randn(8, size) * 0.1)
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.query, self.key, self.value, self.mix = (nn.Linear(size, size) for _ in range(4))
        self.widen, self.narrow = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(0.1)
        self.classify = nn.Linear(size, 10)

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def attend(self, x):
        query, key, value = (self.split(each(x)) for each in (self.query, self.key, self.value))
        weights = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(query.shape[-1]), -1)
        return self.mix((self.dropout(weights) @ value).transpose(1, 2).flatten(2))

    def forward(self, tokens):
        x = self.embed(tokens).flatten(2) + self.position
        x = x + self.dropout(self.attend(self.norms[0](x)))
        x = x + self.dropout(self.narrow(nn.functional.gelu(self.widen(self.norms[1](x)))))
        return self.classify(x.mean(1))


class Embedding(nn.Module):
    """Embeddings of the 64 tokens, cut, joined and picked from in the ways that exporters write as operators."""

    inputs = ("tokens", "places")

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.position = nn.Embedding(64, 2)
        self.hidden = nn.Linear(8 * 32 + 24 + 8, 32)
        self.classify = nn.Linear(32, 10)

    def forward(self, tokens, places):
        every = torch.arange(64)
        position = self.position(every).unsqueeze(0).expand(tokens.shape[0], -1, -1)
        x = torch.cat([self.embed(tokens), position], 2)
        upper, lower = torch.split(x, 32, 1)
        mixed = upper * torch.sigmoid(lower)
        picked = torch.gather(x[:, :, 1:7], 1, places.unsqueeze(2).expand(-1, -1, 6)).flatten(1)
        bright = x[tokens > 12].mean(0).expand(tokens.shape[0], -1)
        hidden = torch.tanh(self.hidden(torch.cat([mixed.flatten(1), picked, bright], 1)))
        return self.classify(hidden)


class MlpMse(nn.Module):
    """A perceptron that predicts the ten indicators of a digit."""

    inputs = ("pixels",)

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.LeakyReLU(0.1), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 10)
        )

    def forward(self, pixels):
        return self.layers(pixels)


# --- from a model to its artifacts -----------------------------------------------------------------------------------


def export(model, arrays, dynamic):
    """The ONNX model with every weight as an initializer; `dynamic`: whether the batch size may vary."""
    arguments = tuple(torch.from_numpy(arrays[name][:BATCH]) for name in model.inputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "forward.onnx")
        torch.onnx.export(
            model,
            arguments,
            path,
            input_names=list(model.inputs),
            output_names=["output"],
            dynamic_axes={name: {0: "batch"} for name in (*model.inputs, "output")} if dynamic else None,
            opset_version=15,
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.TRAINING,
            export_params=True,
            keep_initializers_as_inputs=False,
        )
        return onnx.load(path)


def generate(name, arrays):
    """Write the artifact set of this name and its reference.json and gradients.npz."""
    torch.manual_seed(0)
    build, loss, optimizer, dynamic = SETS[name]
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    model = build()
    forward = export(model, arrays, dynamic)
    parameters = [each for each, _ in model.named_parameters()]
    frozen = [each.name for each in forward.graph.initializer if each.name not in parameters]
    artifacts.generate_artifacts(
        forward,
        requires_grad=parameters,
        frozen_params=frozen,
        loss=loss,
        optimizer=optimizer,
        artifact_directory=folder,
    )
    edit(folder / "eval_model.onnx", one_output_of_normalizations)
    edit(folder / "training_model.onnx", no_dropout)
    for file in sorted(folder.iterdir()):
        print(f"{name}/{file.name}: {file.stat().st_size} bytes")
    found = train(folder, batches(folder, arrays))
    (folder / "reference.json").write_text(json.dumps(found, indent=1) + "\n")


def edit(path, change):
    model = onnx.load(path)
    change(model.graph)
    onnx.save(model, path)


def no_dropout(graph):
    """Set the ratio of every Dropout to 0: other runtimes draw other masks.

    The generator itself removes a Dropout with the ratio 0, so the model is exported with another one.
    """
    ratios = {node.input[1] for node in graph.node if node.op_type in ("Dropout", "DropoutGrad") for _ in node.input}
    ratios |= {node.input[2] for node in graph.node if node.op_type == "DropoutGrad"}
    for each in graph.initializer:
        if each.name in ratios and each.data_type == onnx.TensorProto.FLOAT and not each.dims:
            each.CopyFrom(onnx.numpy_helper.from_array(np.zeros((), np.float32), each.name))


# --- what the old runtime computes with them -------------------------------------------------------------------------


def batches(folder, arrays):
    """The inputs of the 20 steps and of the test, in the order of the training graph."""
    rows = np.random.default_rng(1).permutation(ROWS)
    training, test = rows[:TRAINING_ROWS], rows[TRAINING_ROWS:]
    order = training[np.random.default_rng(100).permutation(TRAINING_ROWS)]
    inputs = [each.name for each in onnx.load(folder / "eval_model.onnx").graph.input]
    names = [name for name in inputs if name in arrays]
    steps = [[arrays[name][order[k * BATCH : (k + 1) * BATCH]] for name in names] for k in range(STEPS)]
    return names, steps, [[arrays[name][test[k : k + BATCH]] for name in names] for k in (0, 50, 100, 150, 200)]


def first_gradients(folder, names, batch):
    """Loss and gradients of the first batch, from the training graph run as a model."""
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    session = onnxruntime.InferenceSession(str(folder / "training_model.onnx"), providers=["CPUExecutionProvider"])
    feeds = dict(zip(names, batch, strict=True))
    for each in session.get_inputs():
        if each.name.endswith(BUFFER_SUFFIX):
            feeds[each.name] = np.zeros(each.shape, np.float32)
        elif each.name == "lazy_reset_grad":
            feeds[each.name] = np.array([True])
        elif each.name not in feeds:
            feeds[each.name] = state.parameters[each.name].data
    loss = session.run(None, feeds)[0]
    buffers = {name.removesuffix(BUFFER_SUFFIX): each for name, each in feeds.items() if name.endswith(BUFFER_SUFFIX)}
    return float(loss), buffers


def train(folder, data):
    """The losses of 20 steps and of the test afterwards; the first step's gradients go to gradients.npz."""
    names, steps, test = data
    loss, gradients = first_gradients(folder, names, steps[0])
    np.savez_compressed(folder / "gradients.npz", **gradients)
    # BatchNormInternal writes its running statistics into the frozen parameters that it reads.
    found = trained(folder, steps, test, LEARNING_RATE[folder.name])
    assert abs(found[0][0] - loss) < 1e-6, (found[0][0], loss)
    return reference(
        *found,
        data="rows = default_rng(1).permutation(1797); test = rows[1500:]; evaluation takes 250 of it, 50 at a time",
        steps="order = rows[:1500][default_rng(100).permutation(1500)]; step k takes order[50 * k : 50 * k + 50]",
        inputs={name: RULES[name] for name in names},
        learning_rate=LEARNING_RATE[folder.name],
        batch_size=BATCH,
    )


BUFFER_SUFFIX = "_grad.accumulation.buffer"
LEARNING_RATE = {"digits_cnn": 0.005, "digits_transformer": 0.005, "embedding": 0.01, "mlp_mse": 0.5}
SETS = {
    "digits_cnn": (DigitsCnn, artifacts.LossType.CrossEntropyLoss, artifacts.OptimType.AdamW, False),
    "digits_transformer": (DigitsTransformer, artifacts.LossType.CrossEntropyLoss, artifacts.OptimType.AdamW, True),
    "embedding": (Embedding, artifacts.LossType.CrossEntropyLoss, artifacts.OptimType.AdamW, True),
    "mlp_mse": (
        MlpMse,
        artifacts.LossType.MSELoss,
        onnxblock.optim.SGD(clip_grad=onnxblock.optim.ClipGradNorm(0.1)),
        True,
    ),
}
RULES = {
    "pixels": "digits / 16, float32; [n, 64], for digits_cnn [n, 1, 8, 8]",
    "tokens": "digits, int64; [n, 64], for digits_transformer [n, 8, 8]",
    "places": "argsort(-digits, axis=1, kind='stable')[:, :4], int64",
    "labels": "the digit, int64",
    "target": "1 at the digit, 0 elsewhere; float32 [n, 10]",
}


def inputs(name, table):
    """Every input by name, a row for each digit."""
    digits, labels = table[:, :64], table[:, 64].astype(np.int64)
    pixels = (digits / 16).astype(np.float32)
    tokens = digits.astype(np.int64)
    return {
        "pixels": pixels.reshape(-1, 1, 8, 8) if name == "digits_cnn" else pixels,
        "tokens": tokens.reshape(-1, 8, 8) if name == "digits_transformer" else tokens,
        "places": np.argsort(-digits, axis=1, kind="stable")[:, :4],
        "labels": labels,
        "target": np.eye(10, dtype=np.float32)[labels],
    }


if __name__ == "__main__":
    table = np.loadtxt(sys.argv[1], delimiter=",")
    for name in sys.argv[2:] or SETS:
        generate(name, inputs(name, table))
