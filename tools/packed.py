"""Train artifact sets, or call operators, by the kernels of a pack alone: python tools/packed.py [SET …] [OPERATOR …]

Of an operator the example in its documentation runs; without any word, that of every operator. Fails where Numba or
llvmlite is imported, a kernel is missing, a result is wrong, or a loss does not fall.
"""

import doctest
import inspect
import sys
import time
from collections.abc import Sequence
from pathlib import Path

BEGIN = time.perf_counter()

import numpy as np  # noqa: E402

import opgrad  # noqa: E402
from opgrad.contract import Operator  # noqa: E402
from opgrad.ops import public_operators  # noqa: E402

STEPS = 10


def main(*words: str) -> None:
    """Train the sets and call the operators that are named; without any word, call every operator."""
    sets = [word for word in words if Path(word).is_dir()]
    for place, folder in enumerate(sets):
        train(folder, time.perf_counter() if place else BEGIN)  # the first has the imports
    call([word for word in words if word not in sets] if words else list(public_operators()))
    if compilers := [name for name in ("numba", "llvmlite") if sys.modules.get(name)]:
        sys.exit(f"packed: {', '.join(compilers)} was imported")
    print("packed: no compiler was imported")


def call(names: Sequence[str]) -> None:
    """Run the examples of operators."""
    if wrong := [name for name in names if not shows_its_result(public_operators()[name])]:
        sys.exit(f"packed: another result than documented: {', '.join(wrong)}")
    if names:
        print(f"packed: {len(names)} operators give what their documentation shows")


def shows_its_result(op: Operator) -> bool:
    """Whether the example in an operator's documentation gives the result that stands below it."""
    names = {"np": np, "opgrad": opgrad}
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(op.reference) or "", names, op.name, None, 0)
    with np.printoptions(precision=4, suppress=True):
        found = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example)
    return found.attempted > 0 and not found.failed


def train(folder: str, start: float) -> None:
    """Train an artifact set on one batch, and tell how long after `start` its first step had ended."""
    from opgrad.training import ArtifactSet, Trainer
    from opgrad.training.run.job import sample_batch
    from opgrad.training.run.recipe import Recipe

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
