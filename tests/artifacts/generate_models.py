"""Make the artifact sets of small models of many kinds, each with data.npz and reference.json.

    python generate_models.py [NAME ...]

Needs onnxruntime-training-cpu 1.19.2 (Python 3.8 to 3.12), torch and onnx 1.16; the tests only read what it wrote.

data.npz holds every input of the training model with a batch for each step, and then for each evaluation, along a new
first axis. reference.json holds the losses of the steps and of the evaluations behind them: those that 1.19.2 computed
or, where it cannot run a model, those of torch, which then trains with SGD. The sets are as 1.19.2 wrote them.
"""

import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import image_models
import numpy as np
import onnx
import torch
from old_runtime import each_apart, one_output_of_normalizations, reference, trained
from onnxruntime.training import artifacts, onnxblock
from torch import nn
from torch.nn import functional

FOLDER = Path(__file__).parent
ROWS, STEPS, EVALUATIONS, RATE = 4, 8, 2, 0.01
IGNORED = -100


# --- the models: `batch` gives the inputs, the loss' label among them ------------------------------------------------


class BatchNormNet(nn.Module):
    """Convolutions, one of them depthwise, each with a batch normalization that trains."""

    outputs, loss = ("scores",), artifacts.LossType.CrossEntropyLoss

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(2, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
            *(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        )
        self.classify = nn.Linear(8, 3)

    def forward(self, pixels):
        return self.classify(self.layers(pixels).mean((2, 3)))

    def batch(self, random):
        return {"pixels": normal(random, ROWS, 2, 6, 6), "labels": random.integers(0, 3, ROWS)}

    def torch_loss(self, pixels, labels):
        return functional.cross_entropy(self(pixels), labels)


class Block(nn.Module):
    """Attention and a perceptron, each behind a normalization."""

    def __init__(self, size, causal):
        super().__init__()
        self.causal, self.size = causal, size
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.every, self.mix = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.widen, self.narrow = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        query, key, value = self.every(self.norms[0](x)).split(self.size, 2)
        weights = query @ key.transpose(1, 2) / self.size**0.5
        if self.causal:
            length = x.shape[1]
            mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
            weights = torch.where(mask, weights, torch.tensor(-1e4))
        x = x + self.mix(torch.softmax(weights, -1) @ value)
        return x + self.narrow(functional.gelu(self.widen(self.norms[1](x)), approximate="tanh"))


class LanguageModel(nn.Module):
    """GPT-2 in small: the loss is part of it, of labels that it shifts, and the scores have the embedding's weights."""

    outputs, loss = ("loss", "logits"), None

    def __init__(self, words=16, size=8, length=6):
        super().__init__()
        self.words = words
        self.embed, self.position = nn.Embedding(words, size), nn.Embedding(length, size)
        self.block, self.norm = Block(size, causal=True), nn.LayerNorm(size)
        self.head = nn.Linear(size, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        places = torch.arange(input_ids.shape[1])
        logits = self.head(self.norm(self.block(self.embed(input_ids) + self.position(places))))
        before, after = logits[..., :-1, :].reshape(-1, self.words), labels[..., 1:].reshape(-1)
        return functional.cross_entropy(before, after, ignore_index=IGNORED), logits

    def batch(self, random):
        tokens = random.integers(0, 16, (ROWS, 6))
        return {"input_ids": tokens, "labels": np.where(random.random(tokens.shape) < 0.2, IGNORED, tokens)}

    def torch_loss(self, input_ids, labels):
        return self(input_ids, labels)[0]


class TokenClasses(nn.Module):
    """A class for every token that is not padding; scores and labels have a row for each token."""

    outputs, loss = ("scores",), onnxblock.loss.CrossEntropyLoss(ignore_index=IGNORED)

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.classify = nn.Embedding(16, 8), Block(8, causal=False), nn.Linear(8, 5)

    def forward(self, tokens):
        return self.classify(self.block(self.embed(tokens))).flatten(0, 1)

    def batch(self, random):
        tokens = random.integers(0, 16, (ROWS, 6))
        return {"tokens": tokens, "labels": np.where(tokens < 4, IGNORED, tokens % 5).reshape(-1)}

    def torch_loss(self, tokens, labels):
        return functional.cross_entropy(self(tokens), labels, ignore_index=IGNORED)


class TiedWeights(nn.Module):
    """An autoencoder whose decoder has the weights of its encoder."""

    outputs, loss = ("output",), artifacts.LossType.MSELoss

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 12) * 0.3)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in (8, 12))

    def forward(self, values):
        hidden = torch.tanh(functional.linear(values, self.weight, self.biases[0]))
        return functional.linear(hidden, self.weight.t(), self.biases[1])

    def batch(self, random):
        values = normal(random, ROWS, 12)
        return {"values": values, "target": values}

    def torch_loss(self, values, target):
        return functional.mse_loss(self(values), target)


class SeveralInputs(nn.Module):
    """Clicks on advertisements: numbers, two categories, a list of items with a mask."""

    outputs, loss = ("score",), artifacts.LossType.BCEWithLogitsLoss

    def __init__(self):
        super().__init__()
        self.users, self.places, self.items = (nn.Embedding(size, 4) for size in (10, 6, 12))
        self.dense, self.top = nn.Linear(5, 4), nn.Sequential(nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 1))

    def forward(self, numbers, user, place, items, mask):
        bag = (self.items(items) * mask.unsqueeze(2)).sum(1)
        return self.top(torch.cat([torch.relu(self.dense(numbers)), self.users(user), self.places(place), bag], 1))

    def batch(self, random):
        return {
            "numbers": normal(random, ROWS, 5),
            "user": random.integers(0, 10, ROWS),
            "place": random.integers(0, 6, ROWS),
            "items": random.integers(0, 12, (ROWS, 3)),
            "mask": random.integers(0, 2, (ROWS, 3)).astype(np.float32),
            "target": random.integers(0, 2, (ROWS, 1)).astype(np.float32),
        }

    def torch_loss(self, numbers, user, place, items, mask, target):
        return functional.binary_cross_entropy_with_logits(self(numbers, user, place, items, mask), target)


class SequenceFirst(nn.Module):
    """A class for each sequence; the data's first axis is the time, as PyTorch's recurrent layers have it."""

    outputs, loss, axes = ("scores",), artifacts.LossType.CrossEntropyLoss, {"steps": 1}

    def __init__(self):
        super().__init__()
        self.before, self.after, self.classify = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, steps):
        hidden = torch.tanh(self.before(steps))
        return self.classify(torch.relu(self.after(hidden)).mean(0))

    def batch(self, random):
        return {"steps": normal(random, 5, ROWS, 4), "labels": random.integers(0, 3, ROWS)}

    def torch_loss(self, steps, labels):
        return functional.cross_entropy(self(steps), labels)


def normal(random, *shape):
    return random.standard_normal(shape).astype(np.float32)


# --- from a model to its artifacts -----------------------------------------------------------------------------------


def export(model, batch):
    """The ONNX model in training mode, with every weight as an initializer and any number of rows."""
    names = list(batch)[: model.forward.__code__.co_argcount - 1]
    axes = getattr(model, "axes", {})
    dynamic = {name: {axes.get(name, 0): "batch"} for name in names}
    file = io.BytesIO()
    torch.onnx.export(
        model,
        tuple(torch.from_numpy(batch[name]) for name in names),
        file,
        input_names=names,
        output_names=list(model.outputs),
        dynamic_axes=dynamic if getattr(model, "dynamic", True) else None,
        opset_version=15,
        do_constant_folding=False,
        training=torch.onnx.TrainingMode.TRAINING,
        dynamo=False,
    )
    return onnx.load_from_string(file.getvalue())


def generate(name):
    """Write the artifact set of this name, its data and its reference."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = SETS[name]()
    batches = [model.batch(random) for _ in range(STEPS + EVALUATIONS)]
    forward = export(model, batches[0])
    held = {each.name for each in forward.graph.initializer}
    parameters = [each for each, _ in model.named_parameters() if each in held]
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    by_torch = getattr(model, "by_torch", False)
    artifacts.generate_artifacts(
        forward,
        requires_grad=parameters,
        frozen_params=[each for each, _ in model.named_buffers() if each in held],
        loss=model.loss,
        optimizer=artifacts.OptimType.SGD if by_torch else artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    inputs = [each.name for each in onnx.load(folder / "training_model.onnx").graph.input]
    names = [each for each in inputs if each in batches[0]]
    np.savez_compressed(folder / "data.npz", **{each: np.stack([batch[each] for batch in batches]) for each in names})
    found = train_torch(model, batches) if by_torch else train(folder, [[each[n] for n in names] for each in batches])
    (folder / "reference.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir())} bytes", found["loss_per_step"])


# --- what computes the reference -------------------------------------------------------------------------------------


def train(folder, batches):
    """The losses of 1.19.2."""
    evaluation = onnx.load(folder / "eval_model.onnx")
    one_output_of_normalizations(evaluation.graph)
    with tempfile.TemporaryDirectory() as place:
        onnx.save(evaluation, Path(place, "eval_model.onnx"))
        found = trained(folder, batches[:STEPS], batches[STEPS:], RATE, Path(place, "eval_model.onnx"))
    return reference(*found, learning_rate=RATE, rows=ROWS)


def train_torch(model, batches):
    """The losses of torch with SGD."""
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for batch in batches[:STEPS]:
        loss = model.torch_loss(**{name: torch.from_numpy(array) for name, array in batch.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        tensors = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in batches[STEPS:]]
        evaluated = [model.torch_loss(**each).item() for each in tensors]
    return reference(losses, evaluated, {}, f"torch {torch.__version__}", learning_rate=RATE, rows=ROWS)


SETS = {
    "batch_norm_net": BatchNormNet,
    "language_model": LanguageModel,
    "token_classes": TokenClasses,
    "tied_weights": TiedWeights,
    "several_inputs": SeveralInputs,
    "sequence_first": SequenceFirst,
    **image_models.SETS,
}

if __name__ == "__main__":
    print("fails:", each_apart(generate, zip(sys.argv[1:] or SETS)))
