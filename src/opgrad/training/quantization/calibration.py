"""The batches of which the scales of activations are found: those that a model will be trained on, or of a file."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from opgrad.training.files.artifact_set import tensor_spec
from opgrad.training.files.dataset import batches, load_inputs, located
from opgrad.training.run.recipe import Recipe

MOST_ROWS, BATCH_ROWS = 512, 64


def calibration(
    model: onnx.ModelProto, recipe: Recipe, data: Path | None, file: Path | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Batches of the inputs of a model, of at most 512 examples.

    recipe: names the dataset, where there is no file, and the rows that are for training. data: the file with all
    examples, of which those for training are taken. file: another one, of which all are.
    Raises ValueError for data that do not fit, OSError.
    """
    held = {each.name for each in model.graph.initializer}
    inputs, rows = located([tensor_spec(each) for each in model.graph.input if each.name not in held])
    source = file or data or recipe.dataset
    if source is None:
        raise ValueError("calibration: there are no data, expected a file or a dataset")
    found = load_inputs(source, inputs, recipe.divide)
    if file is None:
        found, _ = found.split(recipe.test_rows or max(1, found.rows // 5), recipe.split_seed)
    found = found.take(np.arange(min(found.rows, MOST_ROWS))).whole(rows)
    for _, batch in batches(found, rows or BATCH_ROWS):
        yield dict(batch.arrays)
