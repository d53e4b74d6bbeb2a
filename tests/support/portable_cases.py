"""Steps of all artifact sets with all optimizers in a folder, with batches and the losses that opgrad computes."""

import json

import numpy as np
from portable_steps import FOLDERS, RULES, Reference, batches

from opgrad.training import ArtifactSet, Trainer
from opgrad.training.portable import export_step

STEPS, RATE = 20, 0.002


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
            told.append({"name": place.name, "set": name, "losses": losses, "rate": RATE, "batch": shapes(given[0])})
            (place / "batches.bin").write_bytes(b"".join(each.tobytes() for batch in given for each in batch.values()))
    (folder / "cases.json").write_text(json.dumps(told))
    return told


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
