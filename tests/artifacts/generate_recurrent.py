"""Make the artifact sets of models with an LSTM and with a GRU, each with data.npz and reference.json.

    python generate_recurrent.py [NAME ...]

Needs onnxruntime-training-cpu 1.19.2 (Python 3.8 to 3.12) and onnx 1.16; the tests only read what it wrote.

data.npz holds every input of the training model with a batch for each step, and then for each evaluation, along a new
first axis. reference.json holds the losses that 1.19.2 computed. What it demanded: initial states, without which it
writes a graph that it refuses, one direction, and sequences of one length.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from old_runtime import each_apart, reference, trained
from onnx import numpy_helper, parser
from onnxruntime.training import artifacts

FOLDER = Path(__file__).parent
ROWS, TIMES, INPUTS, HIDDEN, CLASSES = 4, 5, 4, 6, 3
STEPS, EVALUATIONS, RATE = 8, 2, 0.02

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


def generate(name):
    """Write the artifact set of this name, its data and its reference."""
    random = np.random.default_rng(0)
    text, parameters, shape = SETS[name](random)
    model = parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"n_{node.output[0]}"
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in parameters.items()
    )
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    artifacts.generate_artifacts(
        model,
        requires_grad=list(parameters),
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )
    data = {
        model.graph.input[0].name: random.standard_normal((STEPS + EVALUATIONS, *shape)).astype(np.float32),
        "labels": random.integers(0, CLASSES, (STEPS + EVALUATIONS, ROWS)),
    }
    np.savez_compressed(folder / "data.npz", **data)
    batches = list(zip(*data.values(), strict=True))
    found = reference(*trained(folder, batches[:STEPS], batches[STEPS:], RATE), learning_rate=RATE, rows=ROWS)
    (folder / "reference.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir())} bytes", found["loss_per_step"])


SETS = {"lstm": lstm, "gru": gru}

if __name__ == "__main__":
    print("fails:", each_apart(generate, zip(sys.argv[1:] or SETS)))
