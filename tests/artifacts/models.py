"""The models of the artifact sets: `batch` gives the inputs, the loss' label among them; Digits have the digits' rows.

What onnxruntime-training 1.19.2 demanded of them:

* Pooling: MaxPoolGrad and AveragePoolGrad learn the shape of their output from the graph, so the whole shape must
  be known there, the batch size too; otherwise the process dies of a division by zero.
* Opset 15, so that layer normalization and Gelu are fused from their parts with all outputs that their gradients need.
* Of recurrent layers: initial states, without which it writes a graph that it refuses, one direction, and sequences of
  one length.
"""

import math

import numpy as np
import torch
from onnxruntime.training import artifacts, onnxblock
from torch import nn
from torch.nn import functional

ROWS, IGNORED = 4, -100
CROSS_ENTROPY = artifacts.LossType.CrossEntropyLoss


def normal(random, *shape):
    return random.standard_normal(shape).astype(np.float32)


class BatchNormNet(nn.Module):
    """Convolutions, one of them depthwise, each with a batch normalization that trains."""

    outputs, loss = ("scores",), CROSS_ENTROPY

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

    outputs, loss, axes = ("scores",), CROSS_ENTROPY, {"steps": 1}

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


# --- images of images, which 1.19.2 could make artifacts of and not train on the CPU; torch trains them ---


def picture(random):
    """Images with a bright square, in steps of an eighth, and for each pixel whether it is in the square."""
    pixels, inside = random.integers(-8, 9, (ROWS, 1, 8, 8)) / 8, np.zeros((ROWS, 8, 8), np.int64)
    for row, (top, left) in enumerate(random.integers(0, 5, (ROWS, 2))):
        inside[row, top : top + 4, left : left + 4] = 1
    return (pixels + inside[:, None]).astype(np.float32), inside


class UNet(nn.Module):
    """A U-Net of two levels, whose deeper one is resized twice: by linear interpolation and to the nearest pixel."""

    outputs, loss, by_torch = ("scores",), artifacts.LossType.BCEWithLogitsLoss, True

    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.deepest, self.join = nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(12, 6, 3, padding=1)
        self.last = nn.Conv2d(10, 1, 1)

    def forward(self, pixels):
        wide = torch.relu(self.wide(pixels))
        deep = torch.relu(self.deep(functional.avg_pool2d(wide, 2)))
        deepest = torch.relu(self.deepest(functional.avg_pool2d(deep, 2)))
        deep = torch.relu(self.join(torch.cat([deep, functional.interpolate(deepest, scale_factor=2.0)], 1)))
        large = functional.interpolate(deep, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.last(torch.cat([wide, large], 1))

    def batch(self, random):
        pixels, inside = picture(random)
        return {"pixels": pixels, "target": inside[:, None].astype(np.float32)}

    def torch_loss(self, pixels, target):
        return functional.binary_cross_entropy_with_logits(self(pixels), target)


class Transposed(nn.Module):
    """An autoencoder whose decoder is a transposed convolution with output padding, and one of groups."""

    outputs, loss, by_torch = ("output",), artifacts.LossType.MSELoss, True

    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.widen = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1)
        self.mix = nn.ConvTranspose2d(4, 2, 2, groups=2, dilation=2, padding=1)

    def forward(self, pixels):
        return self.mix(torch.tanh(self.widen(torch.relu(self.encode(pixels))))).sum(1, keepdim=True)

    def batch(self, random):
        pixels, _ = picture(random)
        return {"pixels": pixels, "target": pixels}

    def torch_loss(self, pixels, target):
        return functional.mse_loss(self(pixels), target)


# --- digits ---


class Digits(nn.Module):
    """What tells the digits."""

    outputs, loss, rate, label, axes = ("output",), CROSS_ENTROPY, 0.005, "labels", {"output": 0}


class DigitsCnn(Digits):
    """Two convolutions, batch normalization, both poolings."""

    dynamic = False

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


class DigitsTransformer(Digits):
    """One encoder layer over the 8 rows of a digit, each of 8 tokens."""

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


class Embedding(Digits):
    """Embeddings of the 64 tokens, cut, joined and picked from in the ways that exporters write as operators."""

    rate = 0.01

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


class MlpMse(Digits):
    """A perceptron that predicts the ten indicators of a digit."""

    loss, optimizer = artifacts.LossType.MSELoss, onnxblock.optim.SGD(clip_grad=onnxblock.optim.ClipGradNorm(0.1))
    rate, label = 0.5, "target"

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.LeakyReLU(0.1), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 10)
        )

    def forward(self, pixels):
        return self.layers(pixels)


# --- recurrent layers, as text ---

TIMES, INPUTS, HIDDEN, CLASSES = 5, 4, 6, 3
# Two layers, the second of which gives its last state and cell; the first axis of the data is the time.
LSTM = f"""<ir_version: 8, opset_import: ["": 15]>
    g (float[{TIMES}, n, {INPUTS}] steps) => (float[n, {CLASSES}] scores)
    <int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] hidden = {{{HIDDEN}}}, int64[1] zero = {{0}}> {{
        size = Shape(steps) rows = Slice(size, one, two) shape = Concat<axis = 0>(one, rows, hidden)
        zeros = ConstantOfShape(shape)
        y0, h0, c0 = LSTM<hidden_size = {HIDDEN}>(steps, w0, r0, b0, , zeros, zeros)
        middle = Squeeze(y0, one)
        y1, h1, c1 = LSTM<hidden_size = {HIDDEN}>(middle, w1, r1, b1, , zeros, zeros)
        h = Squeeze(h1, zero) c = Squeeze(c1, zero) t = Tanh(c) last = Concat<axis = 1>(h, t)
        scores = Gemm(last, wo, bo)
    }}"""
# A layer as PyTorch's, whose states are averaged; the first axis of the data is the batch.
GRU = f"""<ir_version: 8, opset_import: ["": 15]>
    g (float[n, {TIMES}, {INPUTS}] sequences) => (float[n, {CLASSES}] scores)
    <int64[1] one = {{1}}, int64[1] zero = {{0}}, int64[1] hidden = {{{HIDDEN}}}> {{
        size = Shape(sequences) rows = Slice(size, zero, one) shape = Concat<axis = 0>(one, rows, hidden)
        zeros = ConstantOfShape(shape)
        x = Transpose<perm = [1, 0, 2]>(sequences)
        y, h = GRU<hidden_size = {HIDDEN}, linear_before_reset = 1>(x, w0, r0, b0, , zeros)
        states = Squeeze(y, one) mean = ReduceMean<axes = [0], keepdims = 0>(states)
        scores = Gemm(mean, wo, bo)
    }}"""


def weights(random, gates, inputs, layer):
    rows = gates * HIDDEN
    shapes = {"w": (1, rows, inputs), "r": (1, rows, HIDDEN), "b": (1, 2 * rows)}
    return {f"{name}{layer}": 0.5 * random.standard_normal(shape) for name, shape in shapes.items()}


def lstm(random):
    classify = {"wo": random.standard_normal((2 * HIDDEN, CLASSES)), "bo": np.zeros(CLASSES)}
    return LSTM, weights(random, 4, INPUTS, 0) | weights(random, 4, HIDDEN, 1) | classify, (TIMES, ROWS, INPUTS)


def gru(random):
    classify = {"wo": random.standard_normal((HIDDEN, CLASSES)), "bo": np.zeros(CLASSES)}
    return GRU, weights(random, 3, INPUTS, 0) | classify, (ROWS, TIMES, INPUTS)


RECURRENT = {"lstm": lstm, "gru": gru}
SETS = {
    "digits_cnn": DigitsCnn,
    "digits_transformer": DigitsTransformer,
    "embedding": Embedding,
    "mlp_mse": MlpMse,
    "batch_norm_net": BatchNormNet,
    "language_model": LanguageModel,
    "token_classes": TokenClasses,
    "tied_weights": TiedWeights,
    "several_inputs": SeveralInputs,
    "sequence_first": SequenceFirst,
    "resizing_unet": UNet,
    "transposed_convolution": Transposed,
}
