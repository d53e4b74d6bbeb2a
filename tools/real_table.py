"""Train the models of tests/support/real_models.py, and write the table of docs/guides/real-models.md.

    python tools/real_table.py FOLDER

FOLDER is where `make test-real` has put the models.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from real_models import MODELS, RealModel  # noqa: E402
from real_training import refusals, train  # noqa: E402

BEGIN, END = "<!-- from here on by tools/real_table.py -->", "<!-- up to here -->"
HEAD = f"| model | from | licence | what is trained | gradients | loss in 20 steps | export |\n|{'---|' * 7}"


def row(model: RealModel, path: Path) -> str:
    start = f"| {model.task}: {model.name} | {model.package.replace('==', ' ')} | {model.licence} |"
    if reasons := refusals(path):
        return f"{start} nothing: {reasons[0].partition(';')[0].replace('|', ' ')} | | | |"
    with tempfile.TemporaryDirectory() as folder:
        found = train(model, path, Path(folder))
    weights = (
        f"{found.weights} tensors, {found.numbers:,} numbers" if found.weights > 1 else f"{found.numbers:,} numbers"
    )
    losses = f"{found.losses[0]:.3g} → {found.losses[-1]:.3g}"
    return (
        f"{start} {weights} | {found.checked} directions, {found.off:.1g} off | {losses} | {found.exported:.0e} off |"
    )


def main() -> None:
    document = ROOT / "docs" / "guides" / "real-models.md"
    text = document.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    rows = "\n".join(row(model, Path(sys.argv[1]) / model.file) for model in MODELS)
    document.write_text(f"{before}{BEGIN}\n\n{HEAD}\n{rows}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
