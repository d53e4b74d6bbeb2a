"""Steps of all artifact sets with all optimizers in a folder, with batches and the losses that opgrad computes."""

import json
from unittest import mock

import numpy as np
from language_models import make_folder, quantize, vary_attention
from portable_steps import FOLDERS, RULES, Reference, batches

from opgrad.training import ArtifactSet, Trainer
from opgrad.training.export import export_step, layout
from opgrad.training.files import tensor_values
from opgrad.tune import Tuner

STEPS, RATE = 20, 0.002
TUNED = (2, 4, 8)  # bits of language models


def write_cases(folder, kinds=tuple(RULES), sets=tuple(FOLDERS)):
    """Write a folder for each case and cases.json, which names them."""
    told = []
    for name in sets:
        given = list(batches(name, STEPS))
        for kind in kinds:
            place = folder / f"{name}-{kind}"
            place.mkdir(parents=True)
            export_step(FOLDERS[name], place / "step.onnx", optimizer=RULES[kind], flat=True, inline=kind == "lion")
            reference = Reference(Trainer(ArtifactSet.load(FOLDERS[name]), RATE), RULES[kind])
            losses = [reference.step(batch, RATE) for batch in given]
            told.append(write_case(place, name, losses, given))
    told += [write_tuned(folder / f"tuned-{bits}", bits) for bits in TUNED]
    (folder / "cases.json").write_text(json.dumps(told))
    return told


def write_tuned(place, bits):
    """Adapters beside a language model of so many bits, whose weights lie in a file of their own."""
    place.mkdir(parents=True)
    model = make_folder(place / "model", cached=True, heads=4, shared=2, width=64)
    vary_attention(model / "model.onnx")
    quantize(model / "model.onnx", bits, zeros=True, apart=True)
    with mock.patch.object(tensor_values, "HUGE", 256), mock.patch.object(layout, "HUGE", 256):
        tuner = Tuner(model, lora="rank=4, target=all-linear", weight_decay=0.01)
        tuner.export_step(place / "step.onnx", flat=True)
    trainer, given = Trainer(tuner.adapted.setting().artifacts, RATE), list(tuned_batches())
    return write_case(place, "language model", [trainer.step(batch) for batch in given], given)


def tuned_batches(count=STEPS, seed=0):
    """Batches of tokens, of which the first ones of a row do not count."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        tokens = random.integers(0, 25, (3, 9))
        labels = np.roll(tokens, -1, 1)
        labels[0, :3] = -100
        yield {"input_ids": tokens, "labels": labels}


def write_case(place, name, losses, given):
    """Write the batches of a case; returns what is told of it."""
    (place / "batches.bin").write_bytes(b"".join(each.tobytes() for batch in given for each in batch.values()))
    return {"name": place.name, "set": name, "losses": losses, "rate": RATE, "batch": shapes(given[0])}


def shapes(batch):
    return [{"name": name, "dtype": each.dtype.name, "shape": each.shape} for name, each in batch.items()]


def differences(told, found):
    """The largest relative difference of each case's losses."""
    return {
        case["name"]: float(np.max(np.abs(np.array(found[case["name"]]) / np.array(case["losses"]) - 1)))
        if isinstance(found[case["name"]], list)
        else found[case["name"]]
        for case in told
    }
