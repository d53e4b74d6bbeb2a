"""What a fine-tuning leaves: adapters for onnxruntime and for PEFT, a model that takes them, or a merged one."""

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from opgrad.base.files import check_destinations, copied_file, naming, new_file, sha256_of, staged
from opgrad.onnx.graph.conversion import rounded
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import copied
from opgrad.onnx.graph.nodes import attributes_of, captured, reads_values
from opgrad.training.engine.training_graph import borrowed
from opgrad.training.files.checkpoint_tables import ELEMENT_TYPES
from opgrad.training.files.tensor_values import (
    Apart,
    Held,
    array_of,
    is_placeholder,
    placeholder,
    refer,
    tensor_of,
    write_model,
    write_whole,
)
from opgrad.tune import peft
from opgrad.tune.language_model import LanguageModel
from opgrad.tune.lora import Adapter, factors, insert
from opgrad.tune.tokenizer import read_json

MODEL, ADAPTER, ABOUT = "model.onnx", "adapter.onnx_adapter", "tune.json"
OWN = (ABOUT, "metrics.json", "metrics.csv")  # of a fine-tuning, which another one writes itself
TEXTS = (".json", ".txt", ".jinja", ".model")  # endings of files that belong to a model beside its weights
VERSION = 1  # of the adapter, and of the model that it is for, in onnxruntime's format
# What belongs to a model beside its weights, for onnxruntime-genai and for tokenizers.
BESIDE = (
    *("genai_config.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    *("added_tokens.json",),
)
PRODUCTS = ("MatMul", "Gemm", "Gather", "Conv", "FusedMatMul")  # whose weights adapters can be merged into


def with_inputs(base: LanguageModel, adapters: Sequence[Adapter]) -> onnx.ModelProto:
    """The base with its adapters as inputs; without values for them, of rank 0, it computes what the base does."""
    model, kinds = copied(base.source), _kinds(base, adapters)
    insert(model, adapters, scaled=True)
    for adapter in adapters:
        kind, axes = kinds[adapter.name], {adapter.a: 1, adapter.b: 0}  # the axes of the rank
        if adapter.product.op == "Conv":
            axes = {adapter.a: 0, adapter.b: 1}
        for name, shape in adapter.shapes.items():
            if name == adapter.magnitude:
                held, sizes = tensor_of(name, np.ones(adapter.outputs, ELEMENT_TYPES[kind])), list[int | str](shape)
            else:
                dims = [0 if axis == axes[name] else size for axis, size in enumerate(shape)]
                held = TensorProto(name=name, data_type=kind, dims=dims)
                sizes = [f"{adapter.name}.rank" if axis == axes[name] else size for axis, size in enumerate(shape)]
            model.graph.input.append(helper.make_tensor_value_info(name, kind, sizes))
            model.graph.initializer.append(held)
    return model


def _kinds(base: LanguageModel, adapters: Iterable[Adapter]) -> dict[str, int]:
    """The TensorProto.DataType of what each adapter adds to, by the adapter's name."""
    kind = Graph(copied(base.source)).element_type
    return {each.name: kind(each.product.output) or kind(each.product.input) or TensorProto.FLOAT for each in adapters}


def scaled(base: LanguageModel, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What adapters have as the base with inputs takes it: B holds the scale, all in the type of the base."""
    kinds = _kinds(base, adapters)
    found = {}
    for adapter in adapters:
        dtype = ELEMENT_TYPES[kinds[adapter.name]]
        found[adapter.a] = values[adapter.a].astype(dtype)
        found[adapter.b] = (values[adapter.b] * np.float32(adapter.lora.scale)).astype(dtype)
        if adapter.lora.dora:
            found[adapter.magnitude] = factors(base, adapter, values).astype(dtype)
    return found


def replaced(base: LanguageModel, values: Mapping[str, np.ndarray]) -> Apart:
    """The base with other values of its weights, and the values of its placeholders."""
    model, held = copied(base.source), dict(base.values)
    for tensor in model.graph.initializer:
        if tensor.name in values:
            held[tensor.name] = array = rounded(values[tensor.name], tensor.data_type, f"the weight {tensor.name!r}")
            tensor.CopyFrom(placeholder(tensor.name, array))
    return model, {each.name: held[each.name] for each in model.graph.initializer if is_placeholder(each)}


def merged(base: LanguageModel, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray]) -> Apart:
    """The base with the adapters added to its weights, or as nodes beside those that are quantized or shared.

    values: those of adapters, and of weights that were trained themselves.
    Returns the model and the values of its placeholders.
    """
    changed = dict[str, np.ndarray]()
    held = {each.name: each for each in base.source.graph.initializer} | dict(base.values)
    nodes = {node.output[0]: node for node in base.source.graph.node if node.output}
    readers = Counter(name for node in filter(reads_values, base.source.graph.node) for name in captured(node))
    apart: list[Adapter] = []
    for adapter in adapters:
        product, weight = adapter.product, adapter.product.weight
        given = attributes_of(nodes[product.output])
        takes = product.op in PRODUCTS and product.trainable and given.get("alpha", 1.0) == 1
        if weight not in held or readers[weight] > 1 or not takes:
            apart.append(adapter)
            continue
        if weight not in changed:
            changed[weight] = array_of(held[weight]).astype(np.float32)
        a, b = values[adapter.a], values[adapter.b] * np.float32(adapter.lora.scale)
        if product.op == "Conv":
            changed[weight] += np.einsum("or,rikl->oikl", b[:, :, 0, 0], a)
            continue
        columns = changed[weight].T if given.get("transB") else changed[weight]
        own = columns[:, adapter.first : adapter.last]
        own += (a @ b).astype(np.float32)
        if adapter.lora.dora:
            own *= factors(base, adapter, values)
    changed |= {name: array for name, array in values.items() if name in held}
    model, found = replaced(base, changed)
    insert(model, apart, scaled=True)
    model.graph.initializer.extend(tensor_of(*each) for each in scaled(base, apart, values).items())
    return model, found


def checksum(base: LanguageModel, file: Path) -> str:
    """The SHA-256 of a model's file and of the files in which it keeps tensors, in hexadecimal digits."""
    return sha256_of((file, *_data_files(base)))


def _data_files(base: LanguageModel, names: Container[str] | None = None) -> list[Path]:
    """The files beside the model's own in which it keeps tensors. names: of the tensors; None: all."""
    return sorted({place for name, (place, _, _) in base.files.items() if names is None or name in names})


def check_space(base: LanguageModel, folder: Path) -> None:
    """Raise OSError if the copies of the base's files will not fit on the disk of a folder."""
    needed, free = sum(path.stat().st_size for path in _data_files(base, base.values)), shutil.disk_usage(folder).free
    if needed > free:
        what = f"{os.strerror(errno.ENOSPC)}: {free // 10**6:,} MB are free, and the base takes {needed // 10**6:,} MB"
        raise OSError(errno.ENOSPC, what, str(folder))


def check_names(folder: Path, base: LanguageModel) -> None:
    """Raise `NoFile` where a file of a fine-tuning cannot be written into a folder."""
    own = (MODEL, f"{MODEL}.data", ADAPTER, ABOUT, peft.CONFIG, peft.WEIGHTS, *BESIDE)
    check_destinations(folder, (*own, *(path.name for path in _data_files(base, base.values))))


def write_tuned(
    folder: Path, base: LanguageModel, file: Path, adapters: Sequence[Adapter], values: Mapping[str, np.ndarray],
    about: Mapping[str, Any], with_base: bool = True,
) -> list[str]:  # fmt: skip
    """Write adapters, and the base with inputs for them, into a folder; an error leaves it as it was.

    file: of the base, whose other files are copied with `with_base`. about: for tune.json. Returns the files' names.
    """
    model = with_inputs(base, adapters)
    for tensor in model.graph.initializer:
        if is_placeholder(tensor) and tensor.name in base.files:  # it lies where it lies in the base's files
            path, start, count = base.files[tensor.name]
            refer(tensor, path.name, start, count)
    # What onnxruntime's `LoraAdapter` and onnxruntime-genai's `Adapters` load.
    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(VERSION)
    form.set_model_version(VERSION)
    parameters = scaled(base, adapters, values)
    form.set_parameters({name: borrowed(array) for name, array in parameters.items()})
    with staged(folder) as new:
        write_model(model, base.values, new / MODEL)
        for path in _data_files(base, base.values) if with_base else ():
            copied_file(new / path.name, path)
        with naming(new / ADAPTER):
            form.export_adapter(str(new / ADAPTER))
        peft.write(new, base, adapters, values)
        return _finished(new, file.parent, about)


def write_merged(
    folder: Path, file: Path, model: onnx.ModelProto, values: Mapping[str, Held], about: Mapping[str, Any]
) -> list[str]:
    """Write a model with all of its values, and what belongs to the base beside it, into a folder."""
    with staged(folder) as new:
        write_whole(model, values, new / MODEL, beside=file.with_name(f"{file.name}.data").is_file())
        return _finished(new, file.parent, about)


def write_like(
    folder: Path, source: Path, file: Path, model: onnx.ModelProto, values: Mapping[str, Held], about: Mapping[str, Any]
) -> list[str]:
    """Write a model with all of its values into a folder that is like the source, where the model was `file`.

    The files of configurations, tokenizers and modules are copied. Returns the names of the files in the folder.
    """
    found = [each for pattern in ("*", "[0-9]_*/*") for each in sorted(source.glob(pattern)) if each.is_file()]
    beside = [each for each in found if each.suffix in TEXTS and each.name not in OWN]
    names = [*(each.relative_to(source) for each in beside), file.relative_to(source), Path(ABOUT)]
    for part in dict.fromkeys(each.parent for each in names):
        (folder / part).mkdir(parents=True, exist_ok=True)
        with staged(folder / part) as new:
            for name in (each for each in names if each.parent == part):
                if name == file.relative_to(source):
                    write_whole(model, values, new / name.name, beside=file.with_name(f"{file.name}.data").is_file())
                elif name == Path(ABOUT):
                    new_file(new / ABOUT, (json.dumps(about, indent=1) + "\n").encode())
                else:
                    new_file(new / name.name, (source / name).read_bytes())
    return [each.as_posix() for each in names]


def _finished(new: Path, source: Path, about: Mapping[str, Any]) -> list[str]:
    """Copy what belongs to a model beside its weights, and write tune.json; returns the names of all files there."""
    for name in BESIDE:
        if not (source / name).is_file():
            continue
        content = (source / name).read_bytes()
        if name == "genai_config.json":
            config = read_json(source / name)
            decoder = config.get("model", {}).get("decoder")
            if isinstance(decoder, dict):
                decoder["filename"] = MODEL
            content = (json.dumps(config, indent=4) + "\n").encode()
        new_file(new / name, content)
    new_file(new / ABOUT, (json.dumps(about, indent=1) + "\n").encode())
    return sorted(each.name for each in new.iterdir())
