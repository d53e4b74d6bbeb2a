"""Make the artifact sets of this folder, each with reference.json and data.npz or, of digits, gradients.npz.

    python generate.py DIGITS [NAME ...]

Needs onnxruntime-training-cpu 1.19.2 (Python 3.8 to 3.12), torch and onnx 1.16; the tests only read what it wrote.
DIGITS is scikit-learn's file sklearn/datasets/data/digits.csv.gz. Without names every set is made.

reference.json holds the losses of the steps and of the evaluations behind them: those that 1.19.2 computed or, where it
cannot run a model, those of torch, which then trains with SGD. data.npz holds every input of the training model with a
batch for each step, and then for each evaluation, along a new first axis. Which rows of the digits were taken the
reference says; gradients.npz holds the gradients of their first batch, by parameter.

The sets are as 1.19.2 wrote them, but for those of digits: their eval models are repaired, and nothing is dropped.
"""

import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import models
import numpy as np
import onnx
import onnxruntime
import onnxruntime.training.api as api
import torch
from old_runtime import each_apart, one_output_of_normalizations, reference, trained
from onnx import numpy_helper, parser
from onnxruntime.training import artifacts

FOLDER = Path(__file__).parent
STEPS, EVALUATIONS, RATE = 8, 2, 0.01
BATCH, DIGITS_STEPS, BUFFER = 50, 20, "_grad.accumulation.buffer"
RULES = {
    "pixels": "digits / 16, float32; [n, 64], for digits_cnn [n, 1, 8, 8]",
    "tokens": "digits, int64; [n, 64], for digits_transformer [n, 8, 8]",
    "places": "argsort(-digits, axis=1, kind='stable')[:, :4], int64",
    "labels": "the digit, int64",
    "target": "1 at the digit, 0 elsewhere; float32 [n, 10]",
}


# --- models and batches ----------------------------------------------------------------------------------------------


def recurrent(name, random):
    """A model that is written as text, its parameters, and its batches."""
    text, parameters, shape = models.RECURRENT[name](random)
    model = parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"n_{node.output[0]}"
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32), name) for name, array in parameters.items()
    )
    data = {model.graph.input[0].name: random.standard_normal((STEPS + EVALUATIONS, *shape)).astype(np.float32)}
    data["labels"] = random.integers(0, models.CLASSES, (STEPS + EVALUATIONS, models.ROWS))
    return model, list(parameters), [{key: each[k] for key, each in data.items()} for k in range(STEPS + EVALUATIONS)]


def export(model, batch):
    """The ONNX model in training mode, with every weight as an initializer and any number of rows."""
    names = list(batch)[: model.forward.__code__.co_argcount - 1]
    axes = {**dict.fromkeys(names, 0), **getattr(model, "axes", {})}
    file = io.BytesIO()
    torch.onnx.export(
        model,
        tuple(torch.from_numpy(batch[name]) for name in names),
        file,
        input_names=names,
        output_names=list(model.outputs),
        dynamic_axes={name: {axis: "batch"} for name, axis in axes.items()}
        if getattr(model, "dynamic", True)
        else None,
        opset_version=15,
        do_constant_folding=False,
        training=torch.onnx.TrainingMode.TRAINING,
        dynamo=False,
    )
    return onnx.load_from_string(file.getvalue())


def batches_of_digits(name, model, table):
    """What the model is exported with, and the batches of the steps and of the test."""
    digits, labels = table[:, :64], table[:, 64].astype(np.int64)
    pixels, tokens = (digits / 16).astype(np.float32), digits.astype(np.int64)
    arrays = {
        "pixels": pixels.reshape(-1, 1, 8, 8) if name == "digits_cnn" else pixels,
        "tokens": tokens.reshape(-1, 8, 8) if name == "digits_transformer" else tokens,
        "places": np.argsort(-digits, axis=1, kind="stable")[:, :4],
        "labels": labels,
        "target": np.eye(10, dtype=np.float32)[labels],
    }
    code = model.forward.__code__
    names = [*code.co_varnames[1 : code.co_argcount], model.label]
    rows = np.random.default_rng(1).permutation(len(table))
    order = rows[:1500][np.random.default_rng(100).permutation(1500)]
    taken = [slice(BATCH), *(order[k * BATCH : (k + 1) * BATCH] for k in range(DIGITS_STEPS))]
    taken += [rows[1500 + k : 1500 + k + BATCH] for k in (0, 50, 100, 150, 200)]
    return [{each: arrays[each][part] for each in names} for part in taken]


# --- what computes the reference -------------------------------------------------------------------------------------


def edit(path, change):
    model = onnx.load(path)
    change(model.graph)
    onnx.save(model, path)


def no_dropout(graph):
    """Set the ratio of every Dropout to 0: other runtimes draw other masks.

    The generator itself removes a Dropout with the ratio 0, so the model is exported with another one.
    """
    ratios = {node.input[1] for node in graph.node if node.op_type in ("Dropout", "DropoutGrad") for _ in node.input}
    ratios |= {node.input[2] for node in graph.node if node.op_type == "DropoutGrad"}
    for each in graph.initializer:
        if each.name in ratios and each.data_type == onnx.TensorProto.FLOAT and not each.dims:
            each.CopyFrom(numpy_helper.from_array(np.zeros((), np.float32), each.name))


def first_gradients(folder, batch):
    """Loss and gradients of the first batch, from the training graph run as a model."""
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    session = onnxruntime.InferenceSession(str(folder / "training_model.onnx"), providers=["CPUExecutionProvider"])
    feeds = dict(batch)
    for each in session.get_inputs():
        if each.name.endswith(BUFFER):
            feeds[each.name] = np.zeros(each.shape, np.float32)
        elif each.name == "lazy_reset_grad":
            feeds[each.name] = np.array([True])
        elif each.name not in feeds:
            feeds[each.name] = state.parameters[each.name].data
    loss = session.run(None, feeds)[0]
    return float(loss), {name[: -len(BUFFER)]: each for name, each in feeds.items() if name.endswith(BUFFER)}


def train_on_digits(folder, batches, rate):
    """Losses of 1.19.2; the first step's gradients go to gradients.npz."""
    edit(folder / "eval_model.onnx", one_output_of_normalizations)
    edit(folder / "training_model.onnx", no_dropout)
    loss, gradients = first_gradients(folder, batches[0])
    np.savez_compressed(folder / "gradients.npz", **gradients)
    given = [list(each.values()) for each in batches]
    # BatchNormInternal writes its running statistics into the frozen parameters that it reads.
    found = trained(folder, given[:DIGITS_STEPS], given[DIGITS_STEPS:], rate)
    assert abs(found[0][0] - loss) < 1e-6, (found[0][0], loss)
    return reference(
        *found,
        data="rows = default_rng(1).permutation(1797); test = rows[1500:]; evaluation takes 250 of it, 50 at a time",
        steps="order = rows[:1500][default_rng(100).permutation(1500)]; step k takes order[50 * k : 50 * k + 50]",
        inputs={name: RULES[name] for name in batches[0]},
        learning_rate=rate,
        batch_size=BATCH,
    )


def train(folder, batches, rate):
    """Losses of 1.19.2; the batches go to data.npz."""
    names = [each.name for each in onnx.load(folder / "training_model.onnx").graph.input if each.name in batches[0]]
    np.savez_compressed(folder / "data.npz", **{name: np.stack([batch[name] for batch in batches]) for name in names})
    given = [[batch[name] for name in names] for batch in batches]
    with tempfile.TemporaryDirectory() as place:
        evaluation = Path(shutil.copy(folder / "eval_model.onnx", place))
        edit(evaluation, one_output_of_normalizations)
        found = trained(folder, given[:STEPS], given[STEPS:], rate, evaluation)
    return reference(*found, learning_rate=rate, rows=models.ROWS)


def train_torch(folder, model, batches):
    """The losses of torch with SGD; the batches go to data.npz."""
    np.savez_compressed(
        folder / "data.npz", **{name: np.stack([each[name] for each in batches]) for name in batches[0]}
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), RATE), []
    for batch in batches[:STEPS]:
        loss = model.torch_loss(**{name: torch.from_numpy(array) for name, array in batch.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        tensors = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in batches[STEPS:]]
        evaluated = [model.torch_loss(**each).item() for each in tensors]
    producer = f"torch {torch.__version__}"
    return reference(losses, evaluated, {}, producer, learning_rate=RATE, rows=models.ROWS)


def generate(name):
    """Write the artifact set of this name, its data and its reference."""
    torch.manual_seed(0)
    random, frozen = np.random.default_rng(0), []
    model = models.SETS[name]() if name in models.SETS else None
    if model is None:
        forward, parameters, batches = recurrent(name, random)
    else:
        if isinstance(model, models.Digits):
            example, *batches = batches_of_digits(name, model, np.loadtxt(sys.argv[1], delimiter=","))
        else:
            batches = [model.batch(random) for _ in range(STEPS + EVALUATIONS)]
            example = batches[0]
        forward = export(model, example)
        held = {each.name for each in forward.graph.initializer}
        parameters = [each for each, _ in model.named_parameters() if each in held]
        frozen = [each for each, _ in model.named_buffers() if each in held]
    by_torch = getattr(model, "by_torch", False)
    optimizer = artifacts.OptimType.SGD if by_torch else artifacts.OptimType.AdamW
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    artifacts.generate_artifacts(
        forward,
        requires_grad=parameters,
        frozen_params=frozen,
        loss=getattr(model, "loss", models.CROSS_ENTROPY),
        optimizer=getattr(model, "optimizer", optimizer),
        artifact_directory=folder,
    )
    if isinstance(model, models.Digits):
        found = train_on_digits(folder, batches, model.rate)
    else:
        found = train_torch(folder, model, batches) if by_torch else train(folder, batches, RATE if model else 2 * RATE)
    (folder / "reference.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"{name}: {sum(file.stat().st_size for file in folder.iterdir())} bytes", found["loss_per_step"])


if __name__ == "__main__":
    print("fails:", each_apart(generate, zip(sys.argv[2:] or [*models.SETS, *models.RECURRENT])))
