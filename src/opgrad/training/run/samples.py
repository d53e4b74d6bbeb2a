"""A batch for an artifact set, where nobody gives one: to measure a step, or to compile what it takes."""

import numpy as np

from opgrad.training.engine.labels import label_shape
from opgrad.training.files.artifact_set import ArtifactSet
from opgrad.training.files.dataset import load_named
from opgrad.training.run.recipe import Recipe


def sample_batch(artifacts: ArtifactSet, rows: int) -> dict[str, np.ndarray]:
    """So many rows of the set's own dataset, over and over; without one, random numbers, and 0 or 1 for integers."""
    recipe = Recipe.load(artifacts.directory)
    if recipe.dataset is not None:
        data = load_named(recipe.dataset, artifacts.inputs, recipe.divide)
        return dict(data.take(np.arange(rows) % data.rows).arrays)
    random = np.random.default_rng(0)
    arrays = {}
    for spec in artifacts.inputs:
        shape = [size if isinstance(size, int) else 1 for size in spec.shape]
        if spec.axis is not None:
            shape[spec.axis] = rows
        drawn = random.standard_normal(shape) if spec.dtype.kind not in "iub" else random.integers(0, 2, shape)
        arrays[spec.name] = drawn.astype(spec.dtype)
    label, sizes = artifacts.label, label_shape(artifacts, arrays)
    if sizes is not None and sizes != arrays[label.name].shape:
        arrays[label.name] = random.integers(0, 2, sizes).astype(label.dtype)
    return arrays
