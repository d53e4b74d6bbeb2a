"""The page and the charts of a result: they say what the tables say, and ask nobody."""

import re
from pathlib import Path

import pytest
import report
from bench_results import made_up_result
from typer.testing import CliRunner

pytest.importorskip("plotly")

import opgrad
from opgrad.bench import charts
from opgrad.bench.figures import read
from opgrad.bench.page import page
from opgrad.bench.ways import GIVEN, NEW
from opgrad.cli import app

ROOT = Path(__file__).parents[2]


def test_a_chart_has_a_mark_for_each_cell_with_a_peer():
    chart = charts.ratios(made_up_result([2.0, 0.5, 4.0]), NEW)
    (marks,) = chart.data
    assert list(marks.x) == [2.0, 0.5, 4.0]
    assert marks.name == "float32"
    assert "torch: 2 ms, 2.00 times" in marks.text[0]
    assert "1.59 times as fast" in chart.layout.title.text


def test_without_a_peer_there_is_no_chart():
    assert charts.ratios(made_up_result([]), NEW) is None
    assert charts.ratios(made_up_result([2.0]), GIVEN) is None
    assert charts.steps(made_up_result([2.0])) is None
    assert charts.history({"machine": [made_up_result([])]}) is None


def test_releases_are_a_line_for_each_machine():
    results = [made_up_result([ratio]) for ratio in (2.0, 3.0)]
    for result, version in zip(results, ("0.1.0", "0.2.0"), strict=True):
        result["versions"]["opgrad"] = version
    (line,) = charts.history({"fast": results}).data
    assert (list(line.x), list(line.y)) == (["0.1.0", "0.2.0"], pytest.approx([2.0, 3.0]))


def test_a_page_needs_nothing_else():
    result = made_up_result([2.0, 0.5])
    result["machine"]["cpu"] = "A <CPU> & more"
    text = page(result)
    assert "A &lt;CPU&gt; &amp; more" in text
    assert text.count("<table>") == 1
    assert text.count('class="plotly-graph-div"') == 1
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", own)


def test_the_command_writes_a_page(tmp_path):
    file = tmp_path / "new" / "report.html"
    options = ["--ops", "relu", "--dtypes", "float32", "--shapes", "8x4", "--peers", "numpy", "--seconds", "0"]
    result = CliRunner().invoke(app, ["bench", *options, "--html", str(file)])
    assert result.exit_code == 0, result.output
    assert "relu" in file.read_text(encoding="utf-8")


def kept(folder):
    return {path.name: read(path) for path in folder.glob("*.json")}


def test_the_results_of_every_release_are_kept_and_drawn():
    """bench/history/VERSION has that version's files, those that bench/results still has among them."""
    for folder in (ROOT / report.HISTORY).iterdir():
        assert {result["versions"]["opgrad"] for result in kept(folder).values()} == {folder.name}
    for name, result in kept(ROOT / report.RESULTS).items():
        version = result["versions"]["opgrad"]
        if version != opgrad.__version__:
            assert name in kept(ROOT / report.HISTORY / version), f"copy it to {report.HISTORY / version}"
    drawn = {line.name.partition(",")[0] for line in charts.history(report.history(ROOT)).data}
    assert drawn == {name for device in ("cpu", "cuda") for name in report.results(ROOT, device)}
