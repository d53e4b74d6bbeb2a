"""Checks of labels that are classes: the number of classes of a model, and rows with a label out of range."""

from collections.abc import Iterator, Mapping
from contextlib import suppress

import numpy as np
import onnxruntime

from opgrad.onnx.graph.messages import import_microsoft
from opgrad.training.engine.binding import run
from opgrad.training.engine.export import declared_outputs, graph_between
from opgrad.training.engine.training_graph import open_session, session_options
from opgrad.training.files.artifact_set import FILES, ArtifactSet
from opgrad.training.files.dataset import Dataset, TensorSpec, batches, row_of

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
    (known,) = declared_outputs(artifacts.eval_model, [scores], f"class_count: {artifacts.directory / FILES[1]}")
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
    for first, labels, taken in _taken(artifacts, spec, data):
        wrong = taken[_wrong(taken, count, objective.ignored)]
        if wrong.size:
            place = np.argwhere(labels == wrong[0])[0]
            place[spec.axis or 0] += first
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


def _taken(artifacts: ArtifactSet, spec: TensorSpec, data: Dataset) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The labels as the loss takes them, some rows at a time: the first row's number, the data's labels, the loss's.

    Yields nothing if they cannot be computed from the batch alone.
    """
    classes, rows = artifacts.objective.classes, artifacts.batch_rows or ROWS
    assert classes is not None
    who = f"check_labels: {artifacts.directory / FILES[1]}"
    session = _session_of(artifacts, classes, who)
    names = [item.name for item in session.get_inputs()]
    if not set(names) <= data.arrays.keys():
        return
    for start, batch in batches(data, rows):
        if artifacts.batch_rows in (None, batch.rows):
            labels = batch.arrays[spec.name]
            first = start * (data.arrays[spec.name].shape[spec.axis or 0] // data.rows)
            yield first, labels, run(session, [classes], {name: batch.arrays[name] for name in names}, who)[0]


def _scores_shape(artifacts: ArtifactSet, batch: Mapping[str, np.ndarray]) -> tuple[int, ...] | None:
    """The shape of the scores for a batch; None if there are none."""
    scores = artifacts.objective.scores
    if scores is None:
        return None
    who = f"scores of {artifacts.directory / FILES[1]}"
    session = _session_of(artifacts, scores, who)
    values = {**batch, **artifacts.values}
    found: np.ndarray = run(session, None, {item.name: values[item.name] for item in session.get_inputs()}, who)[0]
    return found.shape


def _session_of(artifacts: ArtifactSet, wanted: str, who: str) -> onnxruntime.InferenceSession:
    """A session of the part of the eval graph that computes one tensor. who: its name in messages."""
    source = artifacts.evaluation
    model = graph_between(source, [], declared_outputs(source, [wanted], who))
    import_microsoft(model)
    return open_session(model, session_options(1), who)
