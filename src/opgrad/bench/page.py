"""A result as one HTML page that needs nothing else: charts that one can point at, and every table."""

from collections.abc import Mapping
from html import escape
from typing import Any

from markdown_it import MarkdownIt

from opgrad.bench import charts
from opgrad.bench.tables import full_table
from opgrad.bench.training_tables import is_training, markdown
from opgrad.bench.ways import WAYS

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: auto; padding: 1rem; }}
div.wide {{ overflow-x: auto; }}
div.wide > div {{ min-width: 44rem; }}
table {{ border-collapse: collapse; font-size: 0.85rem; }}
th, td {{ padding: 0.2rem 0.6rem; border-bottom: 1px solid rgba(128, 128, 128, 0.4); white-space: nowrap; }}
th {{ position: sticky; top: 0; background: Canvas; }}
svg text {{ fill: CanvasText !important; }}
.hoverlayer text {{ fill: white !important; }}
</style>
<script>{library}</script>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(result: Mapping[str, Any]) -> str:
    """The page of a result, of cells or of training steps, as `bench.run.run` or `bench.training.run` returns it."""
    tables = markdown(result) if is_training(result) else full_table(dict(result))
    shown = [charts.steps(result)] if is_training(result) else [charts.ratios(result, way) for way in WAYS]
    parts = [f'<div class="wide"><div>{charts.html(chart)}</div></div>' for chart in shown if chart is not None]
    text = MarkdownIt("commonmark", {"html": False}).enable("table").render(tables)
    parts.append(text.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>"))
    title = f"opgrad {result['versions'].get('opgrad') or ''} on {result['machine']['cpu']}"
    return PAGE.format(title=escape(title), library=charts.library(), body="\n".join(parts))
