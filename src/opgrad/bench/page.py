"""A result as one HTML page that needs nothing else: its picture, and every table."""

from html import escape

from markdown_it import MarkdownIt

from opgrad.bench.figures import Result, is_training
from opgrad.bench.plots import drawing, svg
from opgrad.bench.sweep import is_sweep
from opgrad.bench.tables import full_table, sweep_table

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: auto; padding: 1rem; }}
div.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; }}
th, td {{ padding: 0.2rem 0.6rem; border-bottom: 1px solid rgba(128, 128, 128, 0.4); white-space: nowrap; }}
th {{ position: sticky; top: 0; background: Canvas; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(result: Result, *others: Result) -> str:
    """The page of a result, of cells or of training steps, as `bench.run.run` or `bench.training.run` returns it.

    others: the same for other instruction sets.
    """
    drawn = drawing(result, *others)
    parts = [] if drawn is None else [f'<div class="wide">{svg(drawn)}</div>']
    text = (
        MarkdownIt("commonmark", {"html": False}).enable("table").render("\n\n".join(map(_tables, (result, *others))))
    )
    parts.append(text.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>"))
    title = f"opgrad {result['versions'].get('opgrad') or ''} on {result['machine']['cpu']}"
    return PAGE.format(title=escape(title), body="\n".join(parts))


def _tables(result: Result) -> str:
    if is_training(result):
        from opgrad.bench.training_tables import markdown

        return markdown(result)
    return sweep_table(result) if is_sweep(result) else full_table(result)
