"""Train artifact sets, or call softmax, by the kernels of a pack alone: python tools/packed.py [SET …]

Fails where Numba or llvmlite is imported, a kernel is missing, a result is wrong, or a loss does not fall.
"""

import sys
import time

import numpy as np

import opgrad

STEPS = 10


def main(*sets: str) -> None:
    """Train the sets; without any, call softmax and its gradient."""
    for folder in sets:
        train(folder)
    if not sets:
        call()
    if compilers := {"numba", "llvmlite"} & set(sys.modules):
        sys.exit(f"packed: {', '.join(compilers)} was imported")
    print("packed: no compiler was imported")


def call() -> None:
    """Call softmax and its gradient on float32."""
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
    y, e = opgrad.softmax(x), np.exp(x)
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(opgrad.softmax_grad(x, y), y * (x - (x * y).sum(1, keepdims=True)), atol=1e-6)


def train(folder: str) -> None:
    """Train an artifact set on one batch, and tell how long the first step took, imports included."""
    start = time.perf_counter()
    from opgrad.training import ArtifactSet, Recipe, Trainer
    from opgrad.training.run.samples import sample_batch

    artifacts = ArtifactSet.load(folder)
    rows = artifacts.batch_rows or Recipe.load(folder).batch_size
    trainer, batch = Trainer(artifacts), sample_batch(artifacts, rows)
    losses = [trainer.step(batch)]
    seconds = time.perf_counter() - start
    losses += [trainer.step(batch) for _ in range(STEPS - 1)]
    if losses[-1] >= losses[0]:
        sys.exit(f"packed: {folder}: the loss was {losses[0]}, after {STEPS} steps {losses[-1]}")
    print(f"{folder}: loss {losses[0]:.4f}, then {losses[-1]:.4f}; the first step after {seconds:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
