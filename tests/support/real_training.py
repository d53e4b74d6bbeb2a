"""What is tried with a real model: inspect, make artifacts, check gradients by differences, train, export, run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from halved_models import halved
from real_models import RealModel

from opgrad.cli.inspection import inspect
from opgrad.training import ArtifactSet, Trainer
from opgrad.training.artifacts import LossType, OptimType, generate_artifacts

STEPS, WEIGHTS = 20, 6
EPSILON = float(np.finfo(np.float32).eps)
LAST = ("Softmax", "Sigmoid")  # the loss is of what these are given
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Trained:
    """What was found.

    weights, numbers: how many tensors were trained, and their elements.
    checked: directions in which differences were clear.
    off: the largest distance of a gradient from these differences, as a part of its norm.
    losses: before each step, and behind the last.
    exported: how far the exported model's results are from the trained ones, as a part of the largest.
    """

    weights: int
    numbers: int
    checked: int
    off: float
    losses: tuple[float, ...]
    exported: float


def refusals(path: Path) -> list[str]:
    """Why the model cannot be trained, as `opgrad inspect` tells it."""
    found = inspect(path).training
    return found.problems if found else []


def scores_of(path: Path, output: str) -> str:
    """What the loss is of: the output, or what its last Softmax or Sigmoid is given."""
    made = {name: node for node in onnx.load(path).graph.node for name in node.output}
    while made[output].op_type == "Identity":
        output = made[output].input[0]
    return made[output].input[0] if made[output].op_type in LAST else output


def train(model: RealModel, path: Path, folder: Path) -> Trained:
    """Do all of it with one batch, whose target is near to what the model gives."""
    random, scores = np.random.default_rng(0), scores_of(path, model.output)
    batch = {name: make(random) for name, make in model.inputs.items()}
    made = generate_artifacts(
        path, loss=LossType.MSELoss, optimizer=OptimType.AdamW, artifact_directory=folder, loss_input_names=[scores],
        additional_output_names=[scores],
    )  # fmt: skip
    trainer = Trainer(ArtifactSet.load(folder), model.rate)
    given = Evaluated(folder, batch, scores)
    results = given(trainer.parameters)
    noise = random.normal(size=results.shape) * (0.2 * results.std() + 0.02 * np.abs(results).max())
    given.batch = {**batch, "target": (results + noise).astype(np.float32)}
    feeds = {spec.name: given.batch[spec.name] for spec in trainer.artifacts.inputs}
    trainer.compute_gradients(feeds)
    off = list(differences(given, trainer))
    losses = [trainer.step(feeds) for _ in range(STEPS)]
    losses.append(trainer.compute_gradients(feeds))
    trainer.export(folder / "exported.onnx")
    session = onnxruntime.InferenceSession(folder / "exported.onnx")
    result = session.run(None, {each.name: batch[each.name] for each in session.get_inputs()})[0]
    mine = given(trainer.parameters)
    exported = float(np.abs(result - mine).max() / np.abs(mine).max())
    numbers = sum(made.sizes[name] for name in made.trainable)
    return Trained(len(made.trainable), numbers, len(off), max(off, default=0.0), tuple(losses), exported)


@dataclass(frozen=True)
class Halved:
    """The losses of a model in halves, of the same weights in float32, and of the float32 model.

    exported: the TensorProto.DataType of the weights that were trained, in the exported model.
    """

    halves: list[float]
    rounded: list[float]
    floats: list[float]
    exported: set[int]


def losses_of_halves(model: RealModel, path: Path, folder: Path, kind: int) -> Halved:
    """Train a model in float16 or bfloat16 beside itself in float32, with one batch."""
    random, scores = np.random.default_rng(0), scores_of(path, model.output)
    batch = {name: make(random) for name, make in model.inputs.items()}
    source, losses, target, trainer, names = onnx.load(path), [], None, None, ()
    for place, whole in enumerate((source, halved(source, kind, back=True), halved(source, kind))):
        part = folder / str(place)
        part.mkdir()
        made = generate_artifacts(
            whole, requires_grad=names or None, loss=LossType.MSELoss, optimizer=OptimType.AdamW,
            artifact_directory=part, loss_input_names=[scores], additional_output_names=[scores],
        )  # fmt: skip
        names = made.trainable
        trainer = Trainer(ArtifactSet.load(part), model.rate)
        if target is None:
            results = Evaluated(part, batch, scores)(trainer.parameters)
            target = (results + 0.2 * results.std() * random.normal(size=results.shape)).astype(np.float32)
        given = {
            each.name: {**batch, "target": target}[each.name].astype(each.dtype) for each in trainer.artifacts.inputs
        }
        losses.append([trainer.step(given) for _ in range(STEPS)])
    trainer.export(folder / "exported.onnx")
    stored = {each.name: each.data_type for each in onnx.load(folder / "exported.onnx").graph.initializer}
    return Halved(losses[2], losses[1], losses[0], {stored[name] for name in names if name in stored})


class Evaluated:
    """The eval model in stock onnxruntime: results for parameters."""

    def __init__(self, folder: Path, batch: Arrays, scores: str):
        self.batch, self.scores = batch, scores
        self.session = onnxruntime.InferenceSession(folder / "eval_model.onnx")

    def __call__(self, parameters: Arrays) -> np.ndarray:
        feeds = {**self.batch, **parameters}
        return self.session.run(
            [self.scores], {each.name: self._given(each, feeds) for each in self.session.get_inputs()}
        )[0]

    def _given(self, each, feeds: Arrays) -> np.ndarray:
        if each.name in feeds:
            return feeds[each.name]
        return np.zeros([size if isinstance(size, int) else 1 for size in each.shape], np.float32)

    def loss(self, parameters: Arrays) -> float:
        """The loss, formed in float64 from the results."""
        away = self(parameters).astype(np.float64) - self.batch["target"]
        return float((away * away).mean())


def differences(given: Evaluated, trainer: Trainer) -> Iterator[float]:
    """How far gradients are from differences, as parts of their norms, in directions in which differences are clear."""
    norms = {name: float(np.linalg.norm(gradient)) for name, gradient in trainer.gradients.items()}
    weights = sorted((name for name in norms if norms[name]), key=lambda name: -norms[name])
    for name in dict.fromkeys([*weights[:2], *weights[2 :: max(1, len(weights) // WEIGHTS)]]):
        gradient = trainer.gradients[name].astype(np.float64)
        for direction in _directions(gradient):
            told = float((gradient * direction).sum())
            found, unclear = _slope(given, trainer, name, direction, norms[name])
            if unclear <= 0.02 * norms[name]:
                yield max(0.0, abs(found - told) - unclear) / norms[name]


def _directions(gradient: np.ndarray) -> Iterator[np.ndarray]:
    """Along the gradient, along half of its elements, and anywhere."""
    random = np.random.default_rng(1)
    for direction in (gradient, gradient * (random.random(gradient.shape) < 0.5), random.normal(size=gradient.shape)):
        length = np.linalg.norm(direction)
        if length:
            yield direction / length


def _slope(given: Evaluated, trainer: Trainer, name: str, direction: np.ndarray, norm: float) -> tuple[float, float]:
    """The slope of the loss by central differences, and how far off they may be, by their steps and by rounding."""
    parameters = dict(trainer.parameters)
    start = parameters[name].astype(np.float64)
    loss, slopes = given.loss(parameters), []
    noise = 2 * loss**0.5 * EPSILON * float(np.abs(given.batch["target"]).max())  # what rounding does to the loss
    steps = min(0.1 * loss / norm, 0.1 * float(np.linalg.norm(start)) + 1e-3) / 2.0 ** np.arange(8)
    for step in steps:
        ends = []
        for sign in (1, -1):
            parameters[name] = (start + sign * step * direction).astype(np.float32)
            ends.append(given.loss(parameters))
        slopes.append((ends[0] - ends[1]) / (2 * step))
    pairs = [
        (abs(one - other) + noise / step, (4 * other - one) / 3)
        for one, other, step in zip(slopes, slopes[1:], steps[1:], strict=False)
    ]
    unclear, found = min(pairs)
    return found, unclear
