"""Adapters in files: of PEFT, whose matrices are transposed, and the weights that clients of an exported step write."""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opgrad.base.files import json_object, new_file, read_regular
from opgrad.training.files import weights
from opgrad.training.files.checkpoint_tables import Damaged
from opgrad.training.files.weights import decode
from opgrad.training.make.checks import listed
from opgrad.tune.language_model import LanguageModel
from opgrad.tune.lora import Adapter, Lora, choose, module_of, modules, slices
from opgrad.tune.tokenizer import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# The names that modules have in transformers where exporters call them otherwise, by the architecture.
LFM2 = {
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
QWEN3_5 = {f"linear_attn.{name}_proj": f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")}
RENAMED: Mapping[str, Mapping[str, str]] = {
    "phi": {"self_attn.o_proj": "self_attn.dense"},
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl_text"), LFM2),
    "gptoss": {"moe.router": "mlp.router"},
    "granitemoehybrid": {"mlp.down_proj": "shared_mlp.output_linear"},
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": {
        **QWEN3_5,
        **{f"mlp.{name}_proj": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
        "moe.router": "mlp.gate",
        "shared_expert_gate": "mlp.shared_expert_gate",
    },
}
# Models of texts and pictures, of which exporters write the part for texts; transformers has it within the whole.
WITH_PICTURES = {
    f"{name}_text" for name in ("gemma3_vl", "lfm2_vl", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
}
# Modules that are several here, whose results stand behind each other.
JOINED: Mapping[str, Mapping[str, Sequence[str]]] = {
    "phi3": {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    "granitemoehybrid": {"shared_mlp.input_linear": ("mlp.gate_proj", "mlp.up_proj")},
}
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


def turned(array: np.ndarray) -> np.ndarray:
    """A parameter as PEFT keeps it, or one of PEFT's as it is here: matrices are transposed."""
    return array.T if array.ndim == 2 else array


def write(folder: Path, base: LanguageModel, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> None:
    """Write both files into a folder of `staged`."""
    tensors = {
        peft: np.ascontiguousarray(turned(values[name]))
        for adapter in adapters
        for name, peft in names_of(adapter).items()
    }
    config, tensors = _theirs(base, configuration(adapters), tensors)
    new_file(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
    new_file(folder / WEIGHTS, weights.encode_tensors(dict(sorted(tensors.items())), {"format": "pt"}))


def _modules(base: LanguageModel) -> dict[str, list[str]]:
    """The names of transformers for all modules, each with the modules here of which that is made."""
    joined, renamed = JOINED.get(base.architecture, {}), RENAMED.get(base.architecture, {})
    found, around = dict[str, list[str]](), ""
    if any(each.role == "head" for each in base.products):  # what all names begin with is a module around the model
        levels = zip(*(module_of(each).split(".") for each in base.products), strict=False)
        around = "".join(f"{names[0]}." for names in itertools.takewhile(lambda names: len(set(names)) == 1, levels))
    for name, product in modules(base).items():
        whole, parts = name, [name]
        # Builders join q, k and v themselves, as qkv_proj; under another name the product is the module's own.
        if product.parts and not module_of(product).endswith("qkv_proj"):
            whole, parts = module_of(product), [each for each, _, _ in slices(product)]
        for theirs, own in joined.items():
            for part in (each for each in own if name.endswith(f".{each}")):
                before = name.removesuffix(part)
                whole, parts = before + theirs, [before + each for each in own]
        if whole == name:
            ends = (each for each in renamed if name.endswith(f".{each}"))
            if (end := next(ends, None)) is not None:
                whole = name.removesuffix(end) + renamed[end]
        found[_in_whole(base, whole.removeprefix(around))] = parts
    return found


def _in_whole(base: LanguageModel, name: str) -> str:
    """The name of a module or a tensor where the model is a part of one that takes pictures, too."""
    of_texts = re.compile(rf"^({re.escape(PREFIX)})?model\.(?!language_model\.)")
    return of_texts.sub(r"\1model.language_model.", name) if base.architecture in WITH_PICTURES else name


def _theirs(
    base: LanguageModel, config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A configuration and tensors under the names of transformers.

    Adapters of modules that are one module there become one, of the ranks of all together: each has columns of B.
    """
    columns = {name: last - first for each in base.products for name, _, (first, last) in slices(each)}
    chosen, ranks, alphas = config["target_modules"], dict[str, int](), dict[str, float]()
    found, names = dict[str, np.ndarray](), set[str]()
    for theirs, parts in _modules(base).items():
        here = [name for name in parts if name in chosen]
        loras = [_lora(config, name, Path(CONFIG)) for name in here]
        if not here:
            continue
        own, rank, alpha = [_tensors(tensors, name) for name in here], loras[0].rank, loras[0].alpha
        if len(parts) > 1:
            rank = sum(each.rank for each in loras)
            alpha = loras[0].scale * (math.sqrt(rank) if loras[0].rslora else rank)
            if loras[0].dora and len(here) < len(parts):
                raise ValueError(f"{', '.join(here)} have dora, expected all of {', '.join(parts)}, as PEFT has")
            own = [_join(own, loras, here, {name: columns[name] for name in parts})]
        names.add(theirs)
        found |= {f"{PREFIX}{theirs}.{name}": array for name, array in own[0].items()}
        ranks |= {theirs: rank} if rank != config["r"] else {}
        alphas |= {theirs: alpha} if alpha != config["lora_alpha"] else {}
    last = {name.rpartition(".")[2] for name in names}
    every = {name for name in _modules(base) if name.rpartition(".")[2] in last}
    targets = sorted(last if every == names and base.architecture not in WITH_PICTURES else names)
    return {**config, "target_modules": targets, "rank_pattern": ranks, "alpha_pattern": alphas}, found


def _tensors(tensors: Mapping[str, np.ndarray], module: str) -> dict[str, np.ndarray]:
    """The tensors of a module, by the ends of their names."""
    before = f"{PREFIX}{module}."
    return {name.removeprefix(before): array for name, array in tensors.items() if name.startswith(f"{before}lora_")}


def _join(
    tensors: Sequence[Mapping[str, np.ndarray]], loras: Sequence[Lora], names: Sequence[str],
    columns: Mapping[str, int],
) -> dict[str, np.ndarray]:  # fmt: skip
    """The tensors of one module made of several. columns: of all of these, by their names; `names` have adapters."""
    total, rank = np.zeros((sum(columns.values()), sum(each.rank for each in loras)), np.float32), 0
    starts = dict(zip(columns, np.cumsum([0, *columns.values()]), strict=False))
    for own, lora, name in zip(tensors, loras, names, strict=True):
        rows = slice(starts[name], starts[name] + columns[name])
        total[rows, rank : rank + lora.rank] = own["lora_B.weight"] * np.float32(lora.scale / loras[0].scale)
        rank += lora.rank
    a = np.concatenate([each["lora_A.weight"] for each in tensors])
    lengths = [each["lora_magnitude_vector"] for each in tensors if "lora_magnitude_vector" in each]
    whole = {"lora_magnitude_vector": np.concatenate(lengths)} if lengths else {}
    return {"lora_A.weight": a, "lora_B.weight": total, **whole}


def _ours(
    base: LanguageModel, config: dict[str, Any], tensors: Mapping[str, np.ndarray], folder: Path
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A configuration and tensors under the names here: those of a module that is several here are split.

    Of A a part takes the rows that its columns of B read.
    """
    found, columns = dict(tensors), {name: (first, last) for each in base.products for name, _, (first, last) in
                                     slices(each)}  # fmt: skip
    ranks, alphas = dict(config.get("rank_pattern") or {}), dict(config.get("alpha_pattern") or {})
    for theirs, parts in _modules(base).items():
        own = _tensors(tensors, theirs)
        if not own or parts == [theirs]:
            continue
        lora, start = _lora(config, theirs, folder), 0
        for name in own:
            del found[f"{PREFIX}{theirs}.{name}"]
        for part in parts:
            size = columns[part][1] - columns[part][0]
            cut = {name: array[start : start + size] for name, array in own.items() if not name.startswith("lora_A")}
            a, rank, start = own.get("lora_A.weight"), lora.rank, start + size
            if len(parts) > 1 and a is not None and "lora_B.weight" in cut:
                read = np.flatnonzero(cut["lora_B.weight"].any(0))
                read = read if len(read) else np.arange(-(-lora.rank // len(parts)))
                a, rank, cut["lora_B.weight"] = a[read], len(read), cut["lora_B.weight"][:, read]
            cut |= {} if a is None else {"lora_A.weight": a}
            found |= {f"{PREFIX}{part}.{name}": array for name, array in cut.items()}
            ranks = {part: rank, **ranks}
            alphas = {part: lora.scale * (math.sqrt(rank) if lora.rslora else rank), **alphas}
    return {**config, "rank_pattern": ranks, "alpha_pattern": alphas}, found


def configuration(adapters: Sequence[Adapter]) -> dict[str, Any]:
    """The content of adapter_config.json for these adapters, under the names here.

    Raises ValueError where they differ in what PEFT has for all of them alone.
    """
    first = adapters[0].lora
    for name in ("dora", "rslora"):
        if len({getattr(each.lora, name) for each in adapters}) > 1:
            raise ValueError(f"some adapters have {name} and others have not, expected all or none, as PEFT has")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_rslora": first.rslora,
        "use_dora": first.dora,
        "target_modules": [each.name for each in adapters],
        "rank_pattern": {each.name: each.lora.rank for each in adapters},
        "alpha_pattern": {each.name: each.lora.alpha for each in adapters},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def read(folder: Path, base: LanguageModel) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """The adapters in PEFT's files, for a base, and their values by the names that they have here.

    Raises FileNotFoundError, ValueError for damaged files or another model, NotImplementedError for other than LoRA.
    """
    if not all((folder / name).is_file() for name in (CONFIG, WEIGHTS)):
        raise FileNotFoundError(f"{folder} has no {CONFIG} and {WEIGHTS}, expected a folder with an adapter")
    config = read_json(folder / CONFIG)
    for name, known in PLAIN.items():
        if name in config and config[name] not in known:
            raise NotImplementedError(f"{folder / CONFIG}: {name} is {config[name]!r}, expected {known[0]!r}")
    try:
        tensors, _, _ = weights.decode_tensors(read_regular(folder / WEIGHTS))
    except Damaged as damage:
        raise ValueError(f"{folder / WEIGHTS} {damage}") from None
    tensors = {_in_whole(base, name): array for name, array in tensors.items()}
    config, tensors = _ours(base, config, tensors, folder)
    names = {re.sub(r"\.(lora_\w+?)(\.weight)?$", "", name.removeprefix(PREFIX)) for name in tensors}
    own = modules(base)
    if strange := sorted(names - own.keys()):
        raise ValueError(
            f"{folder} is an adapter of another base: it has {listed(strange)}, and the model {listed(sorted(own))}"
        )
    adapters, values = choose(base, [_lora(config, name, folder) for name in sorted(names)]), dict[str, np.ndarray]()
    for adapter in adapters:
        for name, peft in names_of(adapter).items():
            shape = adapter.shapes[name]
            array = tensors.get(peft, tensors.get(f"{peft}.weight"))
            if array is None:
                raise ValueError(f"{folder / WEIGHTS} has no {peft!r}")
            if turned(array).shape != shape:
                raise ValueError(
                    f"{folder} is an adapter of another base: {peft!r} has shape {array.shape}, expected "
                    f"{shape[::-1] if len(shape) == 2 else shape}"
                )
            values[name] = np.array(turned(array), np.float32, order="C")
    return adapters, values


def _lora(config: Mapping[str, Any], module: str, folder: Path) -> Lora:
    """What the adapter of a module is, by a configuration."""
    try:
        found = []
        for pattern, plain in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
            given = config.get(pattern) or {}
            if not isinstance(given, dict):
                raise ValueError(f"{pattern} is {given!r}, expected an object of modules")
            own = (value for name, value in given.items() if module == name or module.endswith(f".{name}"))
            found.append(next(own, config.get(plain, 8)))
        rank, alpha = found
        dropout = float(config.get("lora_dropout", 0.0))
        rslora, dora = (bool(config.get(name, False)) for name in ("use_rslora", "use_dora"))
        return Lora(rank, alpha, module, dropout, rslora, dora)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from None


def read_step_weights(path: Path, base: LanguageModel, checksum: str) -> tuple[list[Adapter], dict[str, np.ndarray]]:
    """The adapters in a weights file, for a base, and their values.

    checksum: the base's. Raises ValueError for a damaged file, one of another base, or one that has no adapters.
    """
    try:
        held = decode(read_regular(path))
    except Damaged as damage:
        raise ValueError(f"{path} {damage}") from None
    about = json_object(held.tune or "{}", f"metadata tune of {path}")
    if not about.get("modules"):
        raise ValueError(f"{path} has no adapters, expected the weights of a step that trains some")
    if about.get("base_sha256") != checksum:
        was = str(about.get("base_sha256"))[:16]
        raise ValueError(f"{path} is of another base: it names {was}…, and the model is {checksum[:16]}…")
    try:
        loras = [Lora(**each) for each in about["lora"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged, its adapters are no adapters: {error}") from None
    adapters = choose(base, loras)
    shapes = {name: shape for each in adapters for name, shape in each.shapes.items()}
    if {name: each.shape for name, each in held.trainable.items()} != shapes:
        raise ValueError(f"{path} is damaged, its tensors are not those of the adapters that it names")
    return adapters, {name: np.array(held.trainable[name], np.float32) for name in shapes}
