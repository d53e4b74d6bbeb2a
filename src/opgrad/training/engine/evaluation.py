"""Evaluates a model on a data set, checks the labels of classes, and finds the shape of labels."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from opgrad.base.arguments import naming
from opgrad.base.locks import once
from opgrad.onnx.graph.conversion import LOADED_AS_FLOATS, compute_in_float32, has_halves
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.loading import check_sizes, read_model
from opgrad.onnx.graph.messages import copied, domain_of, import_microsoft
from opgrad.onnx.graph.nodes import attributes_of
from opgrad.onnxruntime import loading
from opgrad.training.engine.device import Device
from opgrad.training.engine.export import declared_outputs, graph_between
from opgrad.training.engine.training_graph import open_session, run, session_options
from opgrad.training.files.artifact_set import FILES, LOSSES, ArtifactSet
from opgrad.training.files.dataset import Dataset, Examples, TensorSpec, batches, row_of

ROWS = 512  # how many rows' labels are computed at once


def label_shape(artifacts: ArtifactSet, batch: Mapping[str, np.ndarray]) -> tuple[int, ...] | None:
    """The shape of the class labels for a batch, which the graph may leave open; None if it cannot be found out.

    batch: an array for every other input of the graph.
    """
    if artifacts.objective.label is None or artifacts.objective.classes != artifacts.objective.label:
        return None
    shape = _scores_shape(artifacts, batch)
    return None if shape is None else shape[:1] + shape[2:]


def class_count(artifacts: ArtifactSet, data: Dataset) -> int | None:
    """The number of classes, from the graph or from the scores of the first rows; None if labels are no classes."""
    scores = artifacts.objective.scores
    if scores is None or artifacts.objective.classes is None:
        return None
    (known,) = declared_outputs(artifacts.eval_model, [scores])
    sizes = known.type.tensor_type.shape.dim
    if len(sizes) > 1 and sizes[1].HasField("dim_value"):
        return sizes[1].dim_value
    with suppress(Exception):  # rows that do not fit the graph raise an error when the training graph runs
        rows = np.arange(min(artifacts.batch_rows or 1, data.rows))
        shape = _scores_shape(artifacts, data.take(rows).arrays)
        return shape[1] if shape is not None and len(shape) > 1 else None
    return None


def check_labels(artifacts: ArtifactSet, data: Dataset, origin: str) -> None:
    """Raise ValueError, naming the first row, if a label of the data is neither a class nor ignored.

    origin: the file of the data, or the name of a dataset.
    """
    objective = artifacts.objective
    spec = next((each for each in artifacts.inputs if each.name == objective.label), None)
    count = class_count(artifacts, data)
    if spec is None or count is None:
        return
    if objective.every:
        check_classes(data.arrays[spec.name], count, objective.ignored, spec, origin)
        return
    classes, what, axis = objective.classes, f"labels of {artifacts.directory / FILES[1]}", spec.axis or 0
    assert classes is not None
    session = session_of(artifacts, classes, what, session_options(1))  # computes the labels as the loss takes them
    if not {item.name for item in session.get_inputs()} <= data.arrays.keys():
        return
    for start, batch in batches(data, artifacts.batch_rows or ROWS):
        if artifacts.batch_rows not in (None, batch.rows):
            continue
        taken = with_results(session, [classes], batch.arrays, what)[classes]
        wrong = taken[_wrong(taken, count, objective.ignored)]
        if wrong.size:
            place = np.argwhere(batch.arrays[spec.name] == wrong[0])[0]
            place[axis] += start * (data.arrays[spec.name].shape[axis] // data.rows)
            raise ValueError(_message(tuple(map(int, place)), wrong[0], count, spec, origin))


def check_classes(labels: np.ndarray, count: int, ignored: int | None, spec: TensorSpec, origin: str = "") -> None:
    """Raise ValueError, naming the first row, if one of these labels is none of so many classes, nor ignored."""
    if not labels.size or 0 <= labels.min() <= labels.max() < count:
        return
    wrong = _wrong(labels, count, ignored)
    if wrong.any():
        place = tuple(map(int, np.argwhere(wrong)[0]))
        raise ValueError(_message(place, labels[place], count, spec, origin))


def _wrong(labels: np.ndarray, count: int, ignored: int | None) -> np.ndarray:
    wrong = (labels < 0) | (labels >= count)
    return wrong if ignored is None else wrong & (labels != ignored)


def _message(place: tuple[int, ...], label: object, count: int, spec: TensorSpec, origin: str) -> str:
    axis = spec.axis or 0
    row = row_of(origin, place[axis])
    others = [*place[:axis], *place[axis + 1 :]]
    row += f", place {', '.join(map(str, others))}," if others else ""
    where = f"{origin}: {spec.name}" if origin else spec.name
    return f"{where}: {row} is {label}, expected classes from 0 to {count - 1}"


def _scores_shape(artifacts: ArtifactSet, batch: Mapping[str, np.ndarray]) -> tuple[int, ...] | None:
    """The shape of the scores for a batch; None if there are none."""
    scores = artifacts.objective.scores
    if scores is None:
        return None
    what = f"scores of {artifacts.directory / FILES[1]}"
    session = session_of(artifacts, scores, what, session_options(1))
    shape: tuple[int, ...] = with_results(session, [scores], {**batch, **artifacts.values}, what)[scores].shape
    return shape


def session_of(
    artifacts: ArtifactSet, wanted: str, what: str, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    """A session of the part of the eval graph that computes one tensor. what: its name in messages."""
    source = artifacts.evaluation
    model = graph_between(source, [], declared_outputs(source, [wanted]))
    import_microsoft(model)
    return open_session(model, options, what)


@dataclass(frozen=True)
class Evaluation:
    """The loss, a mean over all rows, and the accuracy, which is None if the label is no class.

    If the loss weights rows, the mean is weighted in the same way. If the loss of a batch is a sum over its rows, this
    is the sum over all rows divided by their number. The result does not depend on the batch size.
    """

    loss: float
    accuracy: float | None


class Evaluator:
    """Runs the eval graph, with the tensors that the loss compares as further outputs.

    device: where it computes, with parameters that lie there; None: the CPU.

    outputs: the declarations of the tensors that an exported model has as outputs.
    """

    def __init__(self, artifacts: ArtifactSet, options: onnxruntime.SessionOptions, device: Device | None = None):
        self._artifacts, self._objective, self._device = artifacts, artifacts.objective, device
        self._what = str(artifacts.directory / FILES[1])
        self.outputs = declared_outputs(artifacts.eval_model, self._objective.outputs)
        self._options = options
        self._reduction = _ReductionSearch(artifacts.eval_model).of(artifacts.loss) or BatchReduction()
        self._classes: int | None = None  # the number of classes; 0: it cannot be found out

    @once
    def _session(self) -> onnxruntime.InferenceSession:
        """The session of the eval graph, opened when something is evaluated."""
        model = copied(self._artifacts.evaluation)
        known = {value.name for value in (*model.graph.output, *model.graph.input)}
        for name in [*self._compared, *filter(None, [self._reduction.divisor])]:
            if name not in known:
                model.graph.output.add().name = name
        import_microsoft(model)  # onnxruntime needs it for nodes that it fuses when opgrad's operators are registered
        return open_session(model, self._options, self._what, self._device)

    @property
    def _compared(self) -> list[str]:
        """The names of the scores and the classes that the loss compares; empty if it compares no classes."""
        objective = self._objective
        return [] if objective.scores is None or objective.classes is None else [objective.scores, objective.classes]

    def check_labels(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise ValueError, naming the first row, if a label of a batch is neither a class nor ignored."""
        objective = self._objective
        if objective.label is None or not objective.every:
            return
        if self._classes is None:
            self._classes = class_count(self._artifacts, Dataset(arrays, self._artifacts.axes)) or 0
        if self._classes:
            check_classes(arrays[objective.label], self._classes, objective.ignored, self._artifacts.label)

    @naming("Evaluator")
    def evaluate(self, data: Examples, parameters: Mapping[str, Any], batch_size: int) -> Evaluation:
        """Loss and accuracy over a dataset.

        data: arrays in the dtypes and shapes of the graph's inputs.
        parameters: by name, arrays or what lies on the device.
        batch_size: rows computed at once.
        """
        loss = right = counted = weight = 0.0
        parameters = {**parameters, **self._artifacts.constants}
        others = [*self._compared, *filter(None, [self._reduction.divisor])]
        given = {item.name for item in self._session.get_outputs()}
        wanted = [self._artifacts.loss, *(name for name in others if name in given)]
        for _, batch in batches(data, batch_size):
            found = with_results(self._session, wanted, {**batch.arrays, **parameters}, self._what)
            hits, answers = self._count(found, batch.weight())
            share = self._share(found, answers)
            if share:  # the mean over no sample may be NaN
                loss += float(found[self._artifacts.loss].item()) * (1 if self._reduction.sums else share)
            right += hits
            counted += answers
            weight += share
        return Evaluation(loss / (weight or 1.0), right / (counted or 1.0) if self._compared else None)

    def _share(self, found: Mapping[str, Any], answers: float) -> float:
        """The weight of a batch's loss in the mean over all batches."""
        divisor = self._reduction.divisor
        weights = found.get(self._reduction.weights or "", self._reduction.values)  # None: all classes count the same
        if divisor is not None:
            return float(found[divisor].item())
        if weights is None or not self._compared:
            return float(answers)
        labels = found[self._compared[1]]
        return float(np.asarray(weights)[labels[self._counts(labels)]].sum(dtype=np.float64))

    @naming("exported_accuracy")
    def exported_accuracy(self, model: str | PathLike[str], data: Dataset, batch_size: int = 512) -> float | None:
        """The accuracy of an exported model, in a session without opgrad's operators.

        model: the file. data, batch_size: as in `evaluate`. Returns None if the label is no class.
        """
        what = str(model)
        session = _stock(model, what)
        if not self._compared:
            return None
        rest = self._between(onnx.load(model, load_external_data=False).graph.output)
        right, counted = 0, 0.0
        for _, batch in batches(data, batch_size):
            found = {**batch.arrays, **self._artifacts.constants}
            for each in (session, rest):
                found = found if each is None else with_results(each, None, found, what)
            hits, answers = self._count(found, batch.weight())
            right += hits
            counted += answers
        return right / (counted or 1)

    def _between(self, outputs: "list[onnx.ValueInfoProto]") -> onnxruntime.InferenceSession | None:
        """A session of the part of the loss that converts an exported model's outputs and the labels for comparison.

        None if there is no such part.
        """
        source, known = self._artifacts.eval_model, {*self._artifacts.axes, *(value.name for value in outputs)}
        missing = [name for name in self._compared if name not in known]
        if not missing:
            return None
        rest = graph_between(source, list(outputs), declared_outputs(source, missing))
        if has_halves(source, LOADED_AS_FLOATS):  # the outputs are float32, then: see `_stock`
            compute_in_float32(rest, {each.name for each in outputs})
        return _stock(rest, "the loss")

    def _count(self, found: Mapping[str, np.ndarray], weight: float) -> tuple[int, float]:
        """The number of right answers, and the number of answers that count."""
        if not self._compared:
            return 0, weight
        scores, labels = (found[name] for name in self._compared)
        counts = self._counts(labels)
        return int((counts & (scores.argmax(axis=1) == labels)).sum()), int(counts.sum())

    def _counts(self, labels: np.ndarray) -> np.ndarray:
        ignored = self._objective.ignored
        return labels != ignored if ignored is not None else np.ones(labels.shape, np.bool_)


def with_results(
    session: onnxruntime.InferenceSession, wanted: Sequence[str] | None, found: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """Values by name, and what a session computes of them. wanted: the names of that; None: those of all outputs."""
    names = wanted or [item.name for item in session.get_outputs()]
    feeds = {item.name: found[item.name] for item in session.get_inputs()}
    return {**found, **dict(zip(names, run(session, names, feeds, what), strict=True))}


def _stock(model: str | PathLike[str] | onnx.ModelProto, what: str) -> onnxruntime.InferenceSession:
    """A session without opgrad's operators; it computes in float32 what onnxruntime's CPU has no kernels for."""
    bare = model if isinstance(model, onnx.ModelProto) else read_model(model, outside=False)
    folds, given = check_sizes(bare, what), bare.SerializeToString() if bare is model else model
    if bare is not model and has_halves(bare, LOADED_AS_FLOATS):
        whole = read_model(model)
        compute_in_float32(whole)
        given = whole.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not isinstance(given, bytes) and Path(f"{given}.data").is_file():
        # A model beyond 2 GiB: onnxruntime maps its weights, unless it reorders them into a second copy.
        options.add_session_config_entry("session.disable_prepacking", "1")
    return loading.open_session(given, options, what, stock=True, folds=folds)


# --- how a loss is reduced --------------------------------------------------------------------------------------------


HANDING_ON = ("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Neg", "Sqrt")
TOGETHER = ("Add", "Sub", "Sum")


@dataclass(frozen=True)
class BatchReduction:
    """How a loss is reduced over rows, from which the loss of several batches together follows.

    sums: whether a batch's loss is a sum over its rows; else it is a mean.
    weights: the tensor with the class weights, if a mean is divided by the sum of the labels' weights.
    values: those weights, if they are constants of the graph.
    divisor: the tensor by which a sum is divided, if that is a sum over the rows, too.
    """

    sums: bool = False
    weights: str | None = None
    values: np.ndarray | None = None
    divisor: str | None = None


class _ReductionSearch:
    def __init__(self, model: onnx.ModelProto):
        self._forward, self._seen = Graph(model), set[str]()

    def of(self, name: str) -> BatchReduction | None:
        """The reduction by which a value was computed; None if it was not reduced."""
        node = self._forward.producers.get(name)
        if node is None or name in self._seen:
            return None
        self._seen.add(name)
        if node.op_type in LOSSES:
            reduction, weights = attributes_of(node).get("reduction", "mean"), [*node.input[2:3], ""][0]
            if reduction == "none":
                return None
            if reduction == "sum" or not weights:
                return BatchReduction(sums=reduction == "sum")
            return BatchReduction(weights=weights, values=self._forward.constant(weights))
        if domain_of(node):
            return None
        if node.op_type in ("ReduceSum", "ReduceMean"):
            return self._of_rows(node)
        if node.op_type in HANDING_ON:
            return self.of(node.input[0])
        if node.op_type == "Div":
            found, divisor = self.of(node.input[0]), node.input[1]
            if found is None or not found.sums or self._forward.constant(divisor) is not None:
                return found
            by = self.of(divisor)
            return BatchReduction(divisor=divisor) if by is not None and by.sums else BatchReduction()
        if node.op_type in ("Mul", "Max", *TOGETHER):
            parts = [self.of(each) for each in node.input if self._forward.constant(each) is None]
            return next((each for each in parts if each is not None), None)
        return None

    def _of_rows(self, node: onnx.NodeProto) -> BatchReduction | None:
        """The reduction of a node that reduces axes: its own if it reduces the first axis, else that of its input."""
        before = self._forward.sizes(node.input[0])
        given = [each.ints for each in node.attribute if each.name == "axes"]
        axes = list(given[0]) if given else None
        if len(node.input) > 1 and node.input[1]:
            known = self._forward.constant(node.input[1])
            axes = None if known is None else known.tolist()
        if axes and 0 not in axes and not (before is not None and -len(before) in axes):
            return self.of(node.input[0])
        return BatchReduction(sums=True) if node.op_type == "ReduceSum" else self.of(node.input[0]) or BatchReduction()
