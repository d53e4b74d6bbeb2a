"""Artifact sets that are lowered, and their batches."""

import numpy as np
from sklearn.datasets import load_digits

NAMES = ("digits_cnn", "digits_transformer", "embedding", "mlp_mse")


def batch_inputs(name):
    """Every input that the sets of `artifacts` have, a row for each digit; see artifacts/generate.py."""
    digits, labels = load_digits(return_X_y=True)
    pixels, tokens = (digits / 16).astype(np.float32), digits.astype(np.int64)
    return {
        "pixels": pixels.reshape(-1, 1, 8, 8) if name == "digits_cnn" else pixels,
        "tokens": tokens.reshape(-1, 8, 8) if name == "digits_transformer" else tokens,
        "places": np.argsort(-digits, axis=1, kind="stable")[:, :4],
        "labels": labels.astype(np.int64),
        "target": np.eye(10, dtype=np.float32)[labels],
    }


def batches(name, reference):
    """The batches of the training steps, and those of the evaluation, as the reference describes them."""
    inputs, size = batch_inputs(name), reference["batch_size"]
    rows = np.random.default_rng(1).permutation(1797)
    order, test = rows[:1500][np.random.default_rng(100).permutation(1500)], rows[1500:]
    counts = (order, len(reference["loss_per_step"])), (test, len(reference["eval_loss_per_batch"]))
    return [
        [{key: inputs[key][each[size * k : size * (k + 1)]] for key in reference["inputs"]} for k in range(count)]
        for each, count in counts
    ]
