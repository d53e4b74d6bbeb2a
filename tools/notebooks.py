"""Write and run the notebooks of the documentation: python tools/notebooks.py [NAME …].

What stands in docs/notebooks is made of the scripts in tools/site/notebooks, in the format of editors: a cell begins
with `# %%`, one of text with `# %% [markdown]`. They run in a folder of their own, with examples/ in it.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tools" / "site" / "notebooks"
OUTPUT = ROOT / "docs" / "notebooks"
TIMEOUT = 600  # seconds for a cell


def main() -> None:
    """Run those that are named, or all."""
    for script in sorted(SCRIPTS.glob("*.py")):
        if len(sys.argv) == 1 or script.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
                notebook = written(script)
                NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": folder}}).execute()
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # when each ran
            nbformat.write(notebook, OUTPUT / f"{script.stem}.ipynb")


def written(script: Path) -> nbformat.NotebookNode:
    """The notebook of a script, not yet run."""
    cells = []
    for number, part in enumerate(script.read_text(encoding="utf-8").split("# %%")[1:]):
        head, _, body = part.partition("\n")
        text = body.strip("\n")
        if "markdown" in head:
            lines = (line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
            cell = nbformat.v4.new_markdown_cell("\n".join(lines))
        else:
            cell = nbformat.v4.new_code_cell(text)
        cell.id = f"cell-{number}"  # the same in every run
        cells.append(cell)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


if __name__ == "__main__":
    main()
