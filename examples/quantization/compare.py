"""Train two models in float and as integer models, over five seeds: python compare.py > results.md.

A convolution reads digits; a transformer counts how often each token of a row occurs in it. Each is trained in float,
and quantized: after its training, and by some more epochs of training as an integer model, in which it also learns
from the float model. Weights of 8 bits have a scale for each channel, those of 4 bits one for each block of a product,
and one for a whole convolution. The table has the part of unseen examples that each gets right, in percent, in stock
onnxruntime.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper

from opgrad.training import ArtifactSet, Dataset, Trainer, load_named
from opgrad.training.artifacts import OptimType, generate_artifacts
from opgrad.training.files.dataset import TensorSpec
from opgrad.training.onnxblock.loss import CrossEntropyLoss
from opgrad.training.quantization import Distillation, convert, prepare, with_teacher

HERE, BATCH, SEEDS, CALIBRATED = Path(__file__).parent, 50, 5, 512
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A model, its examples, labels among them, and how it is trained: epochs and learning rates by kind."""

    model: Path
    training: Arrays
    test: Arrays
    epochs: Mapping[str, int]
    rates: Mapping[str, float]
    batch_norm: str = "model"


def digits() -> Task:
    """Scanned digits, of which 297 are for the test."""
    specs = [
        TensorSpec("pixels", np.dtype(np.float32), ("rows", 1, 8, 8)),
        TensorSpec("labels", np.dtype(np.int64), ("rows",)),
    ]
    parts = load_named("digits", specs, {"pixels": 16}).split(297, 1)
    epochs, rates = {"float": 15, "int8": 5, "int4": 20}, {"float": 0.01, "int8": 0.0005, "int4": 0.003}
    file = HERE.parent / "digits_convolution" / "model.onnx"
    return Task(file, *(each.arrays for each in parts), epochs, rates, "train")


def counts() -> Task:
    """Rows of 16 tokens; the label of each is how many others are equal to it."""
    tokens = np.random.default_rng(11).integers(0, 8, (8000, 16))
    labels = (tokens[:, :, None] == tokens[:, None, :]).sum(2) - 1
    training, test = ({"tokens": tokens[part], "labels": labels[part]} for part in (slice(6000), slice(6000, None)))
    epochs, rates = {"float": 12, "int8": 3, "int4": 6}, {"float": 0.005, "int8": 0.0005, "int4": 0.003}
    return Task(HERE / "transformer.onnx", training, test, epochs, rates)


def drawn(file: Path, seed: int) -> onnx.ModelProto:
    """The model with its first weights in another order."""
    model, random = onnx.load(file), np.random.default_rng(seed)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim > 1 and values.dtype == np.float32:
            tensor.CopyFrom(numpy_helper.from_array(random.permuted(values.ravel()).reshape(values.shape), tensor.name))
    return model


def trained(model: onnx.ModelProto, task: Task, kind: str, seed: int, teacher: bool = False) -> onnx.ModelProto:
    """The model after its training, in which the learning rate falls by a cosine."""
    loss = Distillation(CrossEntropyLoss()) if teacher else CrossEntropyLoss()
    epochs, rate, data = task.epochs[kind], task.rates[kind], Dataset(task.training)
    with TemporaryDirectory() as folder:
        generate_artifacts(
            model,
            loss=loss,
            optimizer=OptimType.AdamW,
            artifact_directory=folder,
            frozen_params=["teacher/*"] if teacher else None,
            batch_norm="model" if teacher else task.batch_norm,
        )
        trainer, steps = Trainer(ArtifactSet.load(folder), rate), epochs * -(-data.rows // BATCH)
        for epoch in range(epochs):
            order = np.random.default_rng((seed, epoch)).permutation(data.rows)
            for step, _ in enumerate(trainer.epoch(data, BATCH, order), epoch * steps // epochs):
                trainer.learning_rate = rate * (1 + np.cos(np.pi * (step + 1) / steps)) / 2
        trainer.export(f"{folder}/trained.onnx")
        return onnx.load(f"{folder}/trained.onnx")


def accuracy(model: onnx.ModelProto, task: Task) -> float:
    """The part of the test that a model gets right in stock onnxruntime, in percent."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {name: array for name, array in task.test.items() if name != "labels"}
    return 100 * float((session.run(None, feeds)[0].argmax(-1) == task.test["labels"]).mean())


def compare(task: Task, seed: int) -> list[float]:
    """The accuracies of the float model, and of int8 and int4 after the training and by training."""
    floats = trained(drawn(task.model, seed), task, "float", seed)
    inputs = {name: array for name, array in task.training.items() if name != "labels"}
    batches = [{name: array[at : at + BATCH] for name, array in inputs.items()} for at in range(0, CALIBRATED, BATCH)]
    found = [accuracy(floats, task)]
    for kind, calibration in (("int8", batches), ("int4", ())):
        model = prepare(floats, kind, calibration, per_channel=kind == "int8")
        student = trained(with_teacher(model, floats), task, kind, seed, teacher=True)
        found += [accuracy(convert(model), task), accuracy(convert(student), task)]
    return found


def main(names: Sequence[str]) -> None:
    """Print a line for each seed, and the mean."""
    logging.disable(logging.INFO)
    print("# Integer models beside float ones, percent of unseen examples that are right\n")
    print("| model | seed | float | int8, after training | int8, trained | int4, after training | int4, trained |")
    print("|---|---|---|---|---|---|---|")
    for name, task in (("convolution", digits()), ("transformer", counts())):
        rows = []
        for seed in range(SEEDS) if not names or name in names else ():
            rows.append(compare(task, seed))
            print(f"| {name} | {seed} |", " | ".join(f"{each:.2f}" for each in rows[-1]), "|", flush=True)
        if rows:
            print(f"| {name} | mean |", " | ".join(f"{each:.2f}" for each in np.mean(rows, 0)), "|", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
