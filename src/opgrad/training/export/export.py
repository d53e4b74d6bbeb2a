"""Writes the training step of an artifact set as one plain ONNX model, with the files that a client needs beside it."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import inliner

from opgrad.base.arguments import ArgumentError, ArgumentTypeError, naming, require
from opgrad.base.files import check_destinations, destination, new_file, sha256_of, staged
from opgrad.onnx.graph.graph import Graph
from opgrad.onnx.graph.messages import opset_of
from opgrad.training.export import building
from opgrad.training.export.building import ACCURACY, LOSS, RATE, SEED, SHARE, STEP, UPDATE, Labels
from opgrad.training.export.layout import GRADIENTS, Constants, layout_of
from opgrad.training.export.plain import only_plain_imports
from opgrad.training.export.rules import MOMENTS, NAMES, StepRule
from opgrad.training.files.artifact_set import ArtifactSet, tensor_spec
from opgrad.training.files.checkpoint import Checkpoint, read_checkpoint
from opgrad.training.files.tensor_values import LARGEST_MODEL, with_inputs
from opgrad.training.files.weights import PRESENT, Weights, encode, fixed_metadata

FORMAT, VERSION = "opgrad.step", 1
IGNORED = -1  # the ignored label if the graph names no other
SCORES = "scores"
EVALUATION, INFERENCE = "eval", "infer"
BESIDE = (".json", ".safetensors", ".eval.onnx", ".infer.onnx", ".data")  # ends of the names of files beside a step


@dataclass(frozen=True)
class Exported:
    """What was written. manifest: the content of the JSON file. files: the paths by what they are."""

    manifest: Mapping[str, Any]
    files: Mapping[str, Path]


@naming("export_step")
def export_step(
    artifacts: ArtifactSet | str | PathLike[str], output: str | PathLike[str], *, optimizer: StepRule | None = None,
    clip_norm: float | None = None, checkpoint: Checkpoint | str | PathLike[str] | None = None,
    accumulate: bool = False, flat: bool = False, weights: str = "float32", opset: int | None = None,
    inline: bool = False, outputs: Collection[str] = (), models: Collection[str] = (),
) -> Exported:  # fmt: skip
    """Write a training step as one ONNX model that every runtime takes, without operators beyond ai.onnx.

    artifacts: the artifact set, or its folder. output: the file of the step, such as step.onnx; beside it are written
        step.json, the manifest, and step.safetensors, the weights.
    optimizer: the rule, one of `opgrad.training.export.rules`; None: that of the set.
    clip_norm: the largest norm of all gradients together; None: as the rule says.
    checkpoint: whose parameters and moments the weights file gets; None: the set's.
    accumulate: add gradients of several batches before a step, with the inputs `share` and `update`.
    flat: parameters in one input, moments in another, instead of an input for each.
    weights: "float32", or "float16" for parameters that are kept in half the bytes and computed with in float32.
    opset: of ai.onnx; None: that of the graph, 16 at least. inline: no functions, for runtimes that know none.
    outputs: names of further values of the training graph; "accuracy" is the share of right answers.
    models: "eval" also writes step.eval.onnx (loss, scores, accuracy), "infer" also step.infer.onnx (scores).

    Returns what was written. Frozen parameters are part of the models. Nothing is written unless all can be.
    Raises TypeError, ValueError, also where one of the files is a device, a pipe or a link that `output` does not name,
    FileNotFoundError, and NotImplementedError for a graph with an operator that has no
    form of plain operators.
    """
    target = Path(output)
    if target.suffix != ".onnx":
        raise ArgumentError("output", f"is {target}, expected a name that ends with .onnx")
    target = destination(target)
    check_destinations(target.parent, [f"{target.stem}{each}" for each in BESIDE])
    found = artifacts if isinstance(artifacts, ArtifactSet) else ArtifactSet.load(artifacts)
    require(weights in PRESENT, "weights", weights, f"one of {', '.join(PRESENT)}")
    if strange := set(models) - {EVALUATION, INFERENCE}:
        raise ArgumentError("models", f"has {', '.join(map(repr, strange))}, expected {EVALUATION} or {INFERENCE}")
    rule: StepRule = found.rule if optimizer is None else optimizer
    if type(rule) not in MOMENTS:
        raise ArgumentTypeError("optimizer", f"is of type {type(rule).__name__}, expected a rule such as AdamWRule")
    require(clip_norm is None or 0 < clip_norm < math.inf, "clip_norm", clip_norm, "a number above 0")
    rule = rule if clip_norm is None else replace(rule, max_norm=clip_norm)
    export = _Export(found, rule, np.dtype(weights), opset, flat=flat, accumulate=accumulate, inline=inline)
    held = export.weights(read_checkpoint(checkpoint) if isinstance(checkpoint, (str, PathLike)) else checkpoint)
    made = {"step": export.step(outputs)}
    scores = {found.scores: SCORES} if found.scores else {}
    if EVALUATION in models:
        made[EVALUATION] = export.forward({found.loss: LOSS} | scores, export.labels)
    if INFERENCE in models:
        if not scores:
            raise ValueError("the inference model is asked for, but the loss compares no scores with a label")
        made[INFERENCE] = export.forward(scores, None)
    return export.write(target, made, held)


class _Export:
    def __init__(
        self, artifacts: ArtifactSet, rule: StepRule, dtype: np.dtype[Any], opset: int | None, *, flat: bool,
        accumulate: bool, inline: bool,
    ):  # fmt: skip
        self._artifacts, self._rule, self._inline = artifacts, rule, inline
        # The dtype of the trainable parameters.
        found = sorted({array.dtype.name for array in artifacts.trainable.values()})
        if len(found) != 1 or found[0] not in PRESENT:
            raise NotImplementedError(f"the parameters are {', '.join(found)}, expected one of {', '.join(PRESENT)}")
        self._present = found[0]
        model, held = artifacts.training()
        self._constants = Constants({**artifacts.frozen, **held, **artifacts.constants}, artifacts.files)
        self._gradients = building.plain_gradients(artifacts, model, self._constants, opset)
        # The eval graph gets the opset of the step, because a client runs both in the same runtime.
        self._opset = opset_of(self._gradients.model)
        updated = self._gradients.statistics
        if lack := sorted(updated.keys() - artifacts.frozen.keys()):
            raise NotImplementedError(f"the graph writes into {', '.join(lack)}, expected frozen parameters")
        statistics = {name: each for name, each in artifacts.frozen.items() if name in updated}
        for name in updated:
            del self._constants.arrays[name]
        moments = MOMENTS[type(rule)]
        self.layout = layout_of(artifacts.trainable, statistics, moments, dtype, flat, accumulate)
        self.labels = labels_of(artifacts)

    def step(self, outputs: Collection[str]) -> onnx.ModelProto:
        artifacts, graph = self._artifacts, self._gradients.model.graph
        known = {name for node in graph.node for name in node.output}
        labels = self.labels if ACCURACY in outputs else None
        if ACCURACY in outputs and labels is None:
            raise ArgumentError("outputs", "has the accuracy, expected labels that are classes")
        outputs = [name for name in outputs if name != ACCURACY]
        wanted = [*outputs, *([labels.scores] if labels else [])]
        if lack := [name for name in wanted if name not in known]:
            raise ValueError(
                f"the training graph computes no {lack[0]!r}; ask the evaluation model for it, or name one of "
                f"its values such as {', '.join(sorted(known)[:4])}"
            )
        named = {artifacts.loss: LOSS} | {name: name for name in outputs}
        return self._finished(
            building.build_step(self._gradients, self.layout, self._rule, self._constants, named, labels)
        )

    def forward(self, outputs: Mapping[str, str], labels: Labels | None) -> onnx.ModelProto:
        """The model that gives these values of the eval graph, and for labels the accuracy."""
        artifacts = self._artifacts
        made = building.build_forward(artifacts, self.layout, self._constants, outputs, labels, self._opset)
        return self._finished(made)

    def _finished(self, model: onnx.ModelProto) -> onnx.ModelProto:
        if self._inline:
            model = inliner.inline_local_functions(model)
        only_plain_imports(model)
        model.producer_name = "opgrad"
        if model.ByteSize() > LARGEST_MODEL:
            raise ValueError("the model has more than 2 GiB with its frozen parameters")
        onnx.checker.check_model(with_inputs(model))
        return model

    def weights(self, checkpoint: Checkpoint | None) -> bytes:
        """The content of the weights file: of a checkpoint, or of the set."""
        values = checkpoint.parameters if checkpoint else {**self._artifacts.trainable, **self._artifacts.frozen}
        for each in self.layout.weights:
            if each.name not in values or values[each.name].shape != each.shape:
                raise ValueError(f"the checkpoint has no {each.name!r} of shape {each.shape}")
        dtype = self.layout.weights[0].dtype
        trainable = {each.name: values[each.name].astype(dtype) for each in self.layout.trainable}
        statistics = {each.name: values[each.name].astype(dtype) for each in self.layout.statistics}
        name = NAMES[type(self._rule)]
        kept = next(iter(checkpoint.optimizers.values()), None) if checkpoint else None
        tune = self._artifacts.tune
        names, same = MOMENTS[type(self._rule)], type(self._rule) is type(self._artifacts.rule)
        if kept is None or not same or any(set(names) - kept.moments.get(each, {}).keys() for each in trainable):
            return encode(Weights(trainable, statistics, dtype=self._present, optimizer=name, tune=tune))
        moments = {each: {name: kept.moments[each][name] for name in names} for each in trainable}
        held = Weights(trainable, statistics, moments, self._present, name, kept.step, kept.learning_rate, tune)
        return encode(held)

    def write(self, output: Path, models: Mapping[str, onnx.ModelProto], held: bytes) -> Exported:
        """Write all files, the manifest last."""
        names = {kind: output.name if kind == "step" else f"{output.stem}.{kind}.onnx" for kind in models}
        names |= {"weights": f"{output.stem}.safetensors", "manifest": f"{output.stem}.json"}
        described = self._manifest(models["step"])
        for kind, model in models.items():
            if kind != "step":
                inputs, outputs = ([value.name for value in each] for each in (model.graph.input, model.graph.output))
                described[kind] = {"inputs": inputs, "outputs": outputs}
        with staged(output.parent, name=output.name) as folder:
            data = self._constants.write(list(models.values()), folder, output)
            contents = {kind: model.SerializeToString(deterministic=True) for kind, model in models.items()}
            contents["weights"] = held
            for kind, content in contents.items():
                new_file(folder / names[kind], content)
            described["files"] = {kind: file_entry(folder / names[kind]) for kind in contents}
            described["data"] = [file_entry(path) for path in data]
            new_file(folder / names["manifest"], (json.dumps(described, indent=1) + "\n").encode())
        return Exported(described, {kind: output.with_name(name) for kind, name in names.items()})

    def _manifest(self, step: onnx.ModelProto) -> dict[str, Any]:
        """The content of the manifest without the entries of files."""
        artifacts, layout, labels = self._artifacts, self.layout, self.labels
        label = None if labels is None else {name: getattr(labels, name) for name in ("name", "classes", "ignored")}
        inputs, new = {value.name for value in step.graph.input}, {each.output for each in layout.parts}
        scalars = [name for name in (RATE, STEP, SHARE, UPDATE, SEED) if name in inputs]
        held = {each.input for each in layout.parts} | set(scalars)
        batch = [value for value in step.graph.input if value.name not in held]
        statistics = [each.name for each in layout.statistics]
        name, state, end = NAMES[type(self._rule)], [], 0
        for part in layout.parts:  # with their place in a weights file, which has no sums of gradients
            place = None if part.kind == GRADIENTS else end
            end += part.nbytes
            entry = {"kind": part.kind, "input": part.input, "output": part.output, "dtype": part.dtype.name}
            state.append({**entry, "shape": list(part.shape), "offset": place, "bytes": part.nbytes})
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": artifacts.name,
            "opset": opset_of(step),
            "functions": len(step.functions),
            "optimizer": {"name": name, **asdict(self._rule)},
            "batch": [_tensor(value) for value in batch],
            "batch_rows": artifacts.batch_rows,
            "label": label,
            "scalars": scalars,
            "state": state,
            "outputs": [value.name for value in step.graph.output if value.name not in new],
            "weights": {
                "bytes": sum(each.nbytes for each in layout.weights),
                "all_bytes": sum(each.nbytes for each in layout.tensors),
                "tensors": layout.header(),
                "metadata": fixed_metadata(name, self._present, statistics, artifacts.tune),
            },
        }


def labels_of(artifacts: ArtifactSet) -> Labels | None:
    """The labels, if they are classes in the shape of the scores without axis 1, perhaps by a Reshape; else None."""
    objective, label = artifacts.objective, artifacts.label
    reshaped = {
        each.output[0]
        for each in artifacts.eval_model.graph.node
        if each.op_type == "Reshape" and each.input[0] == objective.label
    }
    if objective.scores is None or objective.classes is None or objective.classes not in {objective.label, *reshaped}:
        return None
    sizes = Graph(artifacts.eval_model).sizes(objective.scores) or []
    classes = sizes[1] if len(sizes) > 1 and isinstance(sizes[1], int) else None
    element_type = onnx.helper.np_dtype_to_tensor_dtype(label.dtype)
    ignored = IGNORED if objective.ignored is None else objective.ignored
    return Labels(label.name, objective.classes, objective.scores, element_type, classes, ignored)


def _tensor(value: onnx.ValueInfoProto) -> dict[str, Any]:
    spec = tensor_spec(value)
    return {"name": spec.name, "dtype": spec.dtype.name, "shape": list(spec.shape)}


def file_entry(path: Path) -> dict[str, Any]:
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": sha256_of([path])}
