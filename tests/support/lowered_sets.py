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
