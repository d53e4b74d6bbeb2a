"""A result as files to be looked at: a picture, and an HTML page that needs nothing else, with every table."""

from collections.abc import Callable, Sequence
from html import escape

from markdown_it import MarkdownIt
from matplotlib.figure import Figure as Drawing

from bench.figures import Result
from bench.options import CommandLine
from bench.plots import drawing, save, svg
from bench.tables import markdown
from opgrad.base.writing import replace_file

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


def write(
    options: CommandLine,
    results: Sequence[Result],
    draw: Callable[..., Drawing | None] = drawing,
    tables: Callable[[Result], str] = markdown,
) -> None:
    """Write the picture and the page that are asked for.

    results: one for each instruction set. draw: makes a picture of them. tables: Markdown of one.
    Raises ValueError if there is nothing to draw.
    """
    for file in filter(None, (options.plot, options.html)):
        file.parent.mkdir(parents=True, exist_ok=True)
    if options.plot is not None:
        save(draw(*results), options.plot)
    if options.html is not None:
        replace_file(options.html, page(results, draw(*results), tables).encode())


def page(results: Sequence[Result], drawn: Drawing | None, tables: Callable[[Result], str] = markdown) -> str:
    """The page of results for one or several instruction sets."""
    parts = [] if drawn is None else [f'<div class="wide">{svg(drawn)}</div>']
    text = MarkdownIt("commonmark", {"html": False}).enable("table").render("\n\n".join(map(tables, results)))
    parts.append(text.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>"))
    title = f"opgrad {results[0]['versions'].get('opgrad') or ''} on {results[0]['machine']['cpu']}"
    return PAGE.format(title=escape(title), body="\n".join(parts))
