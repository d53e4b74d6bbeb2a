"""The examples of docs/guides/artifacts.md run, each where the one before ended."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "guides" / "artifacts.md"


def test_every_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "artifacts").mkdir()
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    names = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 3
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["made"].trainable == ("w0", "b0", "w1", "b1")
    assert names["optimizer_model"].graph.node[0].op_type == "AdamWOptimizer"
