"""Adapters in the files of PEFT: adapter_config.json, and adapter_model.safetensors, whose matrices are transposed."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from opgrad.base.reading import read_regular
from opgrad.base.writing import new_file
from opgrad.training.files import safetensors
from opgrad.training.files.checkpoint_tables import Damaged
from opgrad.training.make.checks import listed
from opgrad.tune.language.model import WHO
from opgrad.tune.lora import Adapter, Lora, choose, modules
from opgrad.tune.tokenizer import read_json

if TYPE_CHECKING:
    from opgrad.tune.language import LanguageModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# What must have its default in a configuration that is read, because it changes what adapters compute.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False, True),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "megatron_config": (None,),
}


def names_of(adapter: Adapter) -> dict[str, str]:
    """The names of an adapter's parameters in PEFT's files, by the names that they have here."""
    name = PREFIX + adapter.name
    if adapter.is_table:
        return {adapter.a: f"{name}.lora_embedding_A", adapter.b: f"{name}.lora_embedding_B"}
    lengths = {adapter.magnitude: f"{name}.lora_magnitude_vector"} if adapter.lora.dora else {}
    return {adapter.a: f"{name}.lora_A.weight", adapter.b: f"{name}.lora_B.weight", **lengths}


def turned(adapter: Adapter, array: np.ndarray) -> np.ndarray:
    """A parameter as PEFT keeps it, or one of PEFT's as it is here: matrices are transposed."""
    return array.T if array.ndim == 2 else array


def write(folder: Path, base: "LanguageModel", adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Write both files into a folder of `staged`."""
    tensors = {
        peft: np.ascontiguousarray(turned(adapter, values[name]))
        for adapter in adapters
        for name, peft in names_of(adapter).items()
    }
    content = json.dumps(configuration(base, adapters), indent=2) + "\n"
    new_file(folder / CONFIG, content.encode())
    new_file(folder / WEIGHTS, safetensors.encode(dict(sorted(tensors.items())), {"format": "pt"}))


def configuration(base: "LanguageModel", adapters: Sequence[Adapter]) -> dict[str, Any]:
    """The content of adapter_config.json for these adapters.

    Raises ValueError where they differ in what PEFT has for all of them alone.
    """
    first = adapters[0].lora
    for name in ("dora", "rslora"):
        if len({getattr(each.lora, name) for each in adapters}) > 1:
            raise ValueError(f"{WHO}: some adapters have {name} and others have not, expected all or none, as PEFT has")
    ranks = {each.name: each.lora.rank for each in adapters if each.lora.rank != first.rank}
    alphas = {each.name: each.lora.alpha for each in adapters if each.lora.alpha != first.alpha}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.rslora,
        "use_dora": first.dora,
        "target_modules": _targets(base, adapters),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def _targets(base: "LanguageModel", adapters: Sequence[Adapter]) -> list[str]:
    """The last parts of the modules' names if these name no others, else the whole names."""
    chosen = {each.name for each in adapters}
    last = {name.rpartition(".")[2] for name in chosen}
    named = {name for name in modules(base) if name.rpartition(".")[2] in last}
    return sorted(last if named == chosen else chosen)


def is_folder(folder: Path) -> bool:
    """Whether a folder has an adapter in PEFT's files."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def read(folder: Path, base: "LanguageModel") -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """The adapters in PEFT's files, for a base, and their values by the names that they have here.

    Raises FileNotFoundError, ValueError for damaged files or an adapter of another model, NotImplementedError for one
    that computes something else than LoRA does.
    """
    if not is_folder(folder):
        raise FileNotFoundError(f"{WHO}: {folder} has no {CONFIG} and {WEIGHTS}, expected a folder with an adapter")
    config = read_json(folder / CONFIG)
    for name, known in PLAIN.items():
        if name in config and config[name] not in known:
            raise NotImplementedError(f"{WHO}: {folder / CONFIG}: {name} is {config[name]!r}, expected {known[0]!r}")
    try:
        tensors, _, _ = safetensors.decode(read_regular(folder / WEIGHTS))
    except Damaged as damage:
        raise ValueError(f"{WHO}: {folder / WEIGHTS} {damage}") from None
    names = {re.sub(r"\.(lora_\w+?)(\.weight)?$", "", name.removeprefix(PREFIX)) for name in tensors}
    own = modules(base)
    if strange := sorted(names - own.keys()):
        raise ValueError(
            f"{WHO}: {folder} is an adapter of another base: it has {listed(strange)}, and the model "
            f"{listed(sorted(own))}"
        )
    loras = [_lora(config, name, folder) for name in sorted(names)]
    adapters = choose(base, loras)
    return adapters, _values(adapters, tensors, folder)


def _lora(config: Mapping[str, Any], module: str, folder: Path) -> Lora:
    """What the adapter of a module is, by a configuration."""
    try:
        rank, alpha = (
            _by_pattern(config, pattern, module, config.get(plain, 8))
            for pattern, plain in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        dropout = float(config.get("lora_dropout", 0.0))
        rslora, dora = (bool(config.get(name, False)) for name in ("use_rslora", "use_dora"))
        return Lora(rank, alpha, module, dropout, rslora, dora)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{WHO}: {folder / CONFIG}: {error}") from None


def _by_pattern(config: Mapping[str, Any], pattern: str, module: str, default: Any) -> Any:
    """The value of the first name in a pattern that is the module's or an end of it."""
    given = config.get(pattern) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{pattern} is {given!r}, expected an object of modules")
    return next((value for name, value in given.items() if module == name or module.endswith(f".{name}")), default)


def _values(adapters: Iterable[Adapter], tensors: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """The parameters of adapters, float32, by the names that they have here."""
    values = {}
    for adapter in adapters:
        for name, peft in names_of(adapter).items():
            shape = adapter.shapes[name]
            array = tensors.get(peft, tensors.get(f"{peft}.weight"))
            if array is None:
                raise ValueError(f"{WHO}: {folder / WEIGHTS} has no {peft!r}")
            found = turned(adapter, array)
            if found.shape != shape:
                raise ValueError(
                    f"{WHO}: {folder} is an adapter of another base: {peft!r} has shape {array.shape}, expected "
                    f"{turned(adapter, np.empty(shape)).shape}"
                )
            values[name] = np.array(found, np.float32, order="C")
    return values
