"""Weights files of exported steps: parameters and moments in the safetensors format, with a SHA-256 of their bytes."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opgrad.training.files import safetensors
from opgrad.training.files.checkpoint_tables import Damaged

FORMAT, VERSION = "opgrad.weights", "1"
LEARNING_RATE = 1e-3  # the learning rate of a file that has none
MOMENTS = ("momentum0", "momentum1")
PRESENT = ("float32", "float16")  # the dtypes of parameters in training graphs


@dataclass(frozen=True)
class Weights:
    """The content of a weights file.

    trainable, statistics: parameters and running statistics by name. moments: those of every trainable parameter by its
    name and by their own; empty if there are none in the file. dtype: that of parameters in the training graph.
    optimizer: the name of the rule. step: the steps done. tune: of a fine-tuning what identifies it, as JSON.
    """

    trainable: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    moments: Mapping[str, Mapping[str, np.ndarray]] = field(default_factory=dict)
    dtype: str = "float32"
    optimizer: str = ""
    step: int = 0
    learning_rate: float = LEARNING_RATE
    tune: str = ""


def encode(weights: Weights) -> bytes:
    """The content of a file: trainable parameters, statistics, then the moments, kind by kind."""
    arrays = {**weights.trainable, **weights.statistics}
    names = list(dict.fromkeys(name for each in weights.moments.values() for name in each))
    arrays |= {f"{moment}/{name}": weights.moments[name][moment] for moment in names for name in weights.trainable}
    digest = hashlib.sha256(safetensors.data(arrays)).hexdigest()
    metadata = fixed_metadata(weights.optimizer, weights.dtype, list(weights.statistics), weights.tune)
    metadata |= {"step": str(weights.step), "learning_rate": repr(weights.learning_rate), "sha256": digest}
    return safetensors.encode(arrays, metadata)


def fixed_metadata(optimizer: str, dtype: str, statistics: Sequence[str], tune: str) -> dict[str, str]:
    """The metadata that all weights files of a step share; they differ in step, learning_rate and sha256."""
    named = {"optimizer": optimizer, "dtype": dtype, "statistics": json.dumps(statistics)}
    named |= {"tune": tune} if tune else {}
    return {"format": FORMAT, "version": VERSION, **named}


def decode(content: bytes | memoryview) -> Weights:
    """The content of a file; parameters get the dtype of the training graph. Raises `Damaged`."""
    arrays, metadata, data = safetensors.decode(content)
    if metadata.get("format") != FORMAT:
        raise Damaged("is a safetensors file, but no weights file of an exported step")
    if metadata.get("version") != VERSION:
        raise Damaged(f"has version {metadata.get('version')}, expected {VERSION}")
    if metadata.get("sha256") != hashlib.sha256(data).hexdigest():
        raise Damaged("is damaged, its SHA-256 is another")
    optimizer, dtype = metadata.get("optimizer", ""), metadata.get("dtype")
    if dtype not in PRESENT:
        raise Damaged(f"is damaged, its dtype is {dtype!r}")
    parted = {name: name.partition("/") for name in arrays}
    of_parameters = {name for name, (kind, _, owner) in parted.items() if kind in MOMENTS and owner in arrays}
    names = _statistics(metadata, arrays)
    held = {name: each.astype(dtype, copy=False) for name, each in arrays.items() if name not in of_parameters}
    trainable = {name: each for name, each in held.items() if name not in names}
    return Weights(
        trainable=trainable,
        statistics={name: held[name] for name in names},
        moments=_moments(arrays, of_parameters, trainable),
        dtype=dtype,
        optimizer=optimizer,
        step=_number(metadata, "step", int),
        learning_rate=_number(metadata, "learning_rate", float),
        tune=metadata.get("tune", ""),
    )


def _statistics(metadata: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> list[str]:
    try:
        names = json.loads(metadata.get("statistics", "[]"))
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(each, str) and each in arrays for each in names):
        raise Damaged("is damaged, its running statistics are none of its tensors")
    return names


def _moments(
    arrays: Mapping[str, np.ndarray], keys: set[str], trainable: Mapping[str, np.ndarray]
) -> dict[str, dict[str, np.ndarray]]:
    found: dict[str, dict[str, np.ndarray]] = {}
    for key in sorted(keys):
        moment, _, parameter = key.partition("/")
        if parameter not in trainable or arrays[key].shape != trainable[parameter].shape:
            raise Damaged(f"is damaged, {key!r} is no moment of a parameter")
        found.setdefault(parameter, {})[moment] = arrays[key]
    return found


def _number(metadata: Mapping[str, str], name: str, kind: Any) -> Any:
    default = {"step": "0", "learning_rate": str(LEARNING_RATE)}[name]
    try:
        value = kind(metadata.get(name, default))
    except ValueError:
        value = -1
    if not 0 <= value < math.inf or (kind is int and value >= 2**63):
        raise Damaged(f"is damaged, its {name} is {metadata.get(name)!r}")
    return value
