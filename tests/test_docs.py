"""The generated parts of the documents are what the generator gives, and the examples of the oneDNN page run."""

import functools
import inspect
import json
import re
from pathlib import Path

import operator_pages
import pytest
import report
from formulas import latex

from bench.cells import select

ROOT = Path(__file__).parents[1]
# Operators that move or describe arrays, for which words say more than signs.
PROSE = {f"{name}_training" for name in ("concat", "split")}
PROSE |= {"broadcast_gradient_args", "average_pool_grad", "is_all_finite", "reduce_all_l2"}


@pytest.mark.parametrize("path", report.documents(ROOT), ids=lambda path: path.name)
def test_generated_parts_are_up_to_date(path):
    assert path.read_text(encoding="utf-8") == report.rewritten(path, ROOT), "run: make tables"


@pytest.mark.parametrize("path", report.documents(ROOT), ids=lambda path: path.name)
def test_links_between_documents_lead_to_sections(path):
    text = path.read_text(encoding="utf-8")
    for target, section in re.findall(r"\]\(([\w./-]*\.md)?(?:#([\w-]+))?\)", text):
        linked = path.parent / target if target else path
        assert linked.is_file(), target
        if section:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
            anchors = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
            assert section in anchors


def test_every_post_op_is_documented():
    table = report.post_op_table(ROOT, ROOT / "docs")
    assert len(table.splitlines()) == 2 + 13 + 21
    assert "| `hardswish(alpha=0.1667, beta=0.5)` |" in table


@pytest.mark.parametrize(
    ("file", "part"),
    [("README.md", "headlines"), ("docs/reference/operators.md", "operators"), ("docs/index.md", "speed")],
)
def test_tables_stand_where_readers_look(file, part):
    assert f"<!-- {part}:begin -->" in (ROOT / file).read_text(encoding="utf-8")


def test_the_readme_is_short_and_ends_with_the_state_and_the_speed():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, end = text.partition("\n## State")
    assert len(text.splitlines()) <= 120
    assert re.findall(r"\bAVX|\bPTX\b|[Kk]ernel|\bcell", before) == []
    assert "have run on one device" in end
    assert re.findall("^## (.*)", end, re.MULTILINE) == ["Speed"]


def test_the_readme_has_ten_headline_figures():
    """As soon as they have been measured."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- headlines:begin -->")[2].partition("<!-- headlines:end -->")[0]
    rows = sum(line.startswith("| `") for line in table.splitlines())
    assert rows == 10 if report.newest(ROOT, "cpu") else table.strip() == report.NO_RESULT
    headlines = {(cell.op.name, cell.workload.label) for cell in select([], [], [], False) if cell.workload.headline}
    assert len(set(report.TEN) & headlines) == len(report.TEN) == 10


def test_every_operator_is_documented():
    assert list(report.missing(ROOT)) == [], "run: make tables"
    for family, members in operator_pages.families().items():
        text = (ROOT / "docs" / "reference" / "operators" / f"{family}.md").read_text(encoding="utf-8")
        for op in members:
            assert f"\n## {op.name}\n" in text


@pytest.mark.parametrize("op", [op for members in operator_pages.families().values() for op in members])
def test_every_formula_is_typeset(op):
    """What is not prose from its beginning to its end, in signs that browsers show."""
    formula = " ".join(operator_pages.PARTS.fullmatch(inspect.getdoc(op.reference))["formula"].split())
    written = latex(formula)
    assert written.count("{") == written.count("}")
    signs = [each for each in map(str.strip, written.split("\n")) if each and not each.startswith(r"\text")]
    assert signs or op.name in PROSE


@pytest.mark.parametrize(
    ("formula", "written"),
    [
        ("y = x / 2 * exp(-x)", r"y = \frac{x}{2} \, \exp(-x)"),
        ("y = x where x > 0 else 0", r"y = \begin{cases} x & \text{where } x > 0 \\ 0 & \text{else} \end{cases}"),
        ("y = sum(x) over axes", r"y = \sum x \text{ over axes}"),
        ("dx[i, k] = [k == i]", r"\mathrm{dx}_{i, k} = \left[k = i\right]"),
        ("the rest is % prose", r"\text{the rest is \% prose}"),
    ],
)
def test_formulas_become_latex(formula, written):
    assert latex(formula) == written


def test_links_lead_to_files():
    parts = [report.operator_table, functools.partial(operator_pages.reference, "softmax"), report.result_pages]
    for part in parts:
        for folder in (ROOT, ROOT / "docs"):
            targets = [text.partition(")")[0].partition("#")[0] for text in part(ROOT, folder).split("](")[1:]]
            assert any(targets)
            assert all((folder / target).is_file() for target in targets if target)


def test_a_part_is_replaced_between_its_markers(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- headlines:begin -->\nold\n<!-- headlines:end -->\nafter\n")
    report.write(tmp_path)
    expected = f"before\n<!-- headlines:begin -->\n\n{report.NO_RESULT}\n\n<!-- headlines:end -->\nafter\n"
    assert path.read_text() == expected
    report.write(tmp_path)
    assert path.read_text() == expected


def test_the_site_has_a_table_for_each_mark():
    texts = [path.read_text(encoding="utf-8") for path in report.documents(ROOT)]
    marks = [name for text in texts for name in re.findall(r"^\*The site has .*<!-- site: ([\w-]+) -->$", text, re.M)]
    assert sorted(marks) == sorted(report.SITE_PARTS)


def test_an_unknown_part_is_refused(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("<!-- news:begin -->\n<!-- news:end -->\n")
    with pytest.raises(ValueError, match="part 'news', expected one of operators, "):
        report.rewritten(path, tmp_path)


@pytest.mark.parametrize(
    "script", sorted((ROOT / "tools" / "site" / "notebooks").glob("*.py")), ids=lambda path: path.stem
)
def test_notebooks_are_those_of_their_scripts_and_ran(script):
    """Cell by cell; what a cell asserts would have left an error among its outputs."""
    cells = json.loads((ROOT / "docs" / "notebooks" / f"{script.stem}.ipynb").read_text())["cells"]
    parts = [part.partition("\n") for part in script.read_text().split("# %%")[1:]]
    assert len(cells) == len(parts)
    for cell, (head, _, body) in zip(cells, parts, strict=True):
        lines = body.strip("\n").splitlines()
        text = [line.removeprefix("#").removeprefix(" ") for line in lines] if "markdown" in head else lines
        assert "".join(cell["source"]).splitlines() == text
        assert all(output["output_type"] != "error" for output in cell.get("outputs", ()))
        assert cell.get("execution_count", 1) is not None
