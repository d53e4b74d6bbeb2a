"""Adapters that clients of an exported step have trained: its weights file tells what they are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.base.reading import json_object, read_regular
from opgrad.training.files.checkpoint_tables import Damaged
from opgrad.training.files.weights import decode
from opgrad.tune.language.model import WHO, LanguageModel
from opgrad.tune.lora import Adapter, Lora, choose


def read(path: Path, base: LanguageModel, checksum: str) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """The adapters in a weights file, for a base, and their values.

    checksum: the base's. Raises ValueError for a damaged file, one of another base, or one that has no adapters.
    """
    try:
        held = decode(read_regular(path))
    except Damaged as damage:
        raise ValueError(f"{WHO}: {path} {damage}") from None
    about = json_object(held.tune or "{}", f"{WHO}: metadata tune of {path}")
    if not about.get("modules"):
        raise ValueError(f"{WHO}: {path} has no adapters, expected the weights of a step that trains some")
    if about.get("base_sha256") != checksum:
        was = str(about.get("base_sha256"))[:16]
        raise ValueError(f"{WHO}: {path} is of another base: it names {was}…, and the model is {checksum[:16]}…")
    adapters = choose(base, _loras(about, path))
    shapes = {name: shape for each in adapters for name, shape in each.shapes.items()}
    if {name: each.shape for name, each in held.trainable.items()} != shapes:
        raise ValueError(f"{WHO}: {path} is damaged, its tensors are not those of the adapters that it names")
    return adapters, {name: np.array(held.trainable[name], np.float32) for name in shapes}


def _loras(about: Mapping[str, Any], path: Path) -> list[Lora]:
    """What the adapters are."""
    try:
        return [Lora(**each) for each in about["lora"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{WHO}: {path} is damaged, its adapters are no adapters: {error}") from None
