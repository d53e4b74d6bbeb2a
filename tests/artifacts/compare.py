"""Make artifacts with opgrad and with onnxruntime-training 1.19.2, train both in 1.19.2, and compare.

    PYTHONPATH=src:tests/support python tests/artifacts/compare.py

Needs onnxruntime-training-cpu 1.19.2 with torch (Python 3.8 to 3.12), onnx 1.16, ml_dtypes and flatbuffers. Of every
model it prints the largest difference between the losses of six steps and one evaluation, and fails where the graphs
have other inputs or outputs, or the losses differ by more than float32 rounds.
"""

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from old_runtime import each_apart, trained
from small_models import LABELS, build, images, normal, perceptron, two_outputs

RANDOM = np.random.default_rng(0)
STEPS, TOLERANCE = 6, 1e-6


@dataclass
class Case:
    """A model and the arguments that both generators get.

    trainable, frozen: names. new: arguments for opgrad alone.
    """

    model: onnx.ModelProto
    trainable: list
    batch: list
    loss: str = "CrossEntropyLoss"
    optimizer: str = "AdamW"
    frozen: list = field(default_factory=list)
    more: dict = field(default_factory=dict)
    new: dict = field(default_factory=dict)


def floats(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def cases():
    names, plain = ["w0", "b0", "w1", "b1"], perceptron(15)
    yield "mse", Case(plain, names, [floats(6, 4), floats(6, 3)], "MSELoss")
    yield "l1, sgd", Case(plain, names, [floats(6, 4), floats(6, 3)], "L1Loss", "SGD")
    yield "bce", Case(plain, names, [floats(6, 4), (floats(6, 3) > 0).astype(np.float32)], "BCEWithLogitsLoss")
    more = {"additional_output_names": ["scores", "a"]}
    yield "cross entropy", Case(plain, names[:3], [floats(6, 4), LABELS], frozen=["b1"], more=more)
    yield "two outputs", Case(two_outputs(), names, [floats(6, 4), LABELS], more={"loss_input_names": ["scores"]})
    yield "images", Case(images(), ["w0", "scale", "bias", "w1"], [floats(4, 2, 6, 6), LABELS[:4]],
                         frozen=["mean", "var"], new={"batch_norm": "train"})  # fmt: skip
    words = """g (int64[n, 7] x) => (float[n, 3] y) {
        e = Gather(table, x) q = MatMul(e, wq) k = MatMul(e, wk) t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(q, t)
        p = Softmax(s) o = MatMul(p, e) r = Add(o, e) m = ReduceMean<axes = [1], keepdims = 0>(r) y = MatMul(m, w) }"""
    attention = build(words, normal(table=(9, 8), wq=(8, 8), wk=(8, 8), w=(8, 3)), 15)
    yield "words", Case(attention, ["table", "wq", "wk", "w"], [RANDOM.integers(0, 9, (6, 7)), LABELS])


def make(artifacts, case, folder, **more):
    artifacts.generate_artifacts(
        case.model, case.trainable, case.frozen, artifacts.LossType[case.loss], artifacts.OptimType[case.optimizer],
        folder, **case.more, **more,
    )  # fmt: skip


def losses(folder, batch):
    """The losses of some steps, and of an evaluation."""
    found, evaluated, _ = trained(folder, [batch] * STEPS, [batch])
    return np.array(found + evaluated)


def ports(path):
    """The types of a graph's inputs and outputs, by name but for that of the loss."""
    graph = onnx.load(path).graph
    return [(each.name, each.type) for each in graph.input], [(each.name, each.type) for each in graph.output[1:]]


def compare(name, case):
    from onnxruntime.training import artifacts as old

    from opgrad.training import artifacts as new

    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, each) for each in ("old", "new")]
        for folder in folders:
            folder.mkdir()
        make(old, case, folders[0])
        make(new, case, folders[1], **case.new)
        for file in ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"):
            assert ports(folders[0] / file) == ports(folders[1] / file), file
        theirs, mine = (losses(folder, case.batch) for folder in folders)
        difference = np.abs(mine - theirs).max()
        print(f"{name}: {theirs[0]:.6f} to {theirs[-1]:.6f}, difference {difference:.1e}")
        assert difference <= TOLERANCE * np.abs(theirs).max()


def main():
    if failed := each_apart(compare, cases()):
        sys.exit(f"differs: {', '.join(failed)}")


if __name__ == "__main__":
    main()
