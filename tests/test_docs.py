"""The generated parts of the documents are what the generator gives, and the examples of the oneDNN page run."""

import re
from pathlib import Path

import pytest

from opgrad import report
from opgrad.bench.cells import select
from opgrad.contract import operators

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", report.documents(ROOT), ids=lambda path: path.name)
def test_generated_parts_are_up_to_date(path):
    assert path.read_text(encoding="utf-8") == report.rewritten(path, ROOT), "run: make tables"


def test_examples_for_those_who_come_from_onednn_run():
    blocks = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "onednn.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert blocks
    names = {}
    for block in blocks:
        exec(block, names)  # each goes on where the one before ended


@pytest.mark.parametrize("path", report.documents(ROOT), ids=lambda path: path.name)
def test_links_between_documents_lead_to_sections(path):
    text = path.read_text(encoding="utf-8")
    for target, section in re.findall(r"\]\(([\w./-]*\.md)?(?:#([\w-]+))?\)", text):
        linked = path.parent / target if target else path
        assert linked.is_file(), target
        if section:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
            assert section in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings], (
                section
            )


def test_every_post_op_is_documented():
    table = report.post_op_table(ROOT, ROOT / "docs")
    assert len(table.splitlines()) == 2 + 13 + 21
    assert "| `hardswish(alpha=0.1667, beta=0.5)` |" in table


@pytest.mark.parametrize(
    ("file", "part"),
    [("README.md", "headlines"), ("docs/operators.md", "operators"), ("docs/benchmark.md", "benchmark")],
)
def test_tables_stand_where_readers_look(file, part):
    assert f"<!-- {part}:begin -->" in (ROOT / file).read_text(encoding="utf-8")


def test_the_readme_has_ten_headline_figures():
    """As soon as they have been measured."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- headlines:begin -->")[2].partition("<!-- headlines:end -->")[0]
    rows = sum(line.startswith("| `") for line in table.splitlines())
    assert rows == 10 if report.newest(ROOT, "cpu") else table.strip() == report.NO_RESULT
    headlines = {(cell.op.name, cell.workload.label) for cell in select([], [], [], False) if cell.workload.headline}
    assert len(set(report.TEN) & headlines) == len(report.TEN) == 10


def test_every_operator_is_documented():
    text = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    for name in operators():
        assert f"\n## {name}\n" in text


def test_links_lead_to_files():
    for part in (report.operator_table, report.operator_reference):
        for folder in (ROOT, ROOT / "docs"):
            targets = [text.partition(")")[0] for text in part(ROOT, folder).split("](")[1:]]
            files = [target for target in targets if not target.startswith("#")]
            assert files
            assert all((folder / target).is_file() for target in files)


def test_a_part_is_replaced_between_its_markers(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("before\n<!-- benchmark:begin -->\nold\n<!-- benchmark:end -->\nafter\n")
    report.write(tmp_path)
    expected = f"before\n<!-- benchmark:begin -->\n\n{report.NO_RESULT}\n\n<!-- benchmark:end -->\nafter\n"
    assert path.read_text() == expected
    report.write(tmp_path)
    assert path.read_text() == expected


def test_an_unknown_part_is_refused(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("<!-- news:begin -->\n<!-- news:end -->\n")
    with pytest.raises(ValueError, match="part 'news', expected one of operators, "):
        report.rewritten(path, tmp_path)
