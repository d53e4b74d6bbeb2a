"""Train an exported step on the arrays of an .npz file: python train.py step.json data.npz trained.safetensors"""

import sys

import numpy as np
from step import Step

EPOCHS, BATCH, RATE = 10, 50, 0.001


def main(manifest, data, output):
    step = Step(manifest)
    with np.load(data) as file:
        arrays = {entry["name"]: file[entry["name"]] for entry in step.manifest["batch"]}
    rows = len(next(iter(arrays.values())))
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(rows)
        batches = [order[start : start + BATCH] for start in range(0, rows - BATCH + 1, BATCH)]
        losses = [step.train({name: array[rows] for name, array in arrays.items()}, RATE) for rows in batches]
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
        step.save(output)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
