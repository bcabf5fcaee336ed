"""The workbook as web pages that read whole without a network.

    build/index.html    one entry per notebook: title, question, outcome, seconds
    build/NAME.html     the notebook: text, folded code, figures, the way to the next one
    build/style.css     every colour and size, copied from pages.css

nbconvert renders the cells; the page around them is here. No script, font or picture comes from elsewhere.
"""

from __future__ import annotations

import base64
import mimetypes
import re
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from jinja2 import DictLoader
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

if TYPE_CHECKING:
    from .workbook import Result

__all__ = ["write_index", "write_page"]

CSS = Path(__file__).with_name("pages.css")

# nbconvert's plain template, with code that folds (closed where the notebook hides its source) and no scripts
TEMPLATE = """
{%- extends 'basic/index.html.j2' -%}
{% block input %}
{%- if cell.source.strip() %}
<details class="code" {{ '' if cell.metadata.get('jupyter', {}).get('source_hidden') else 'open' }}>
<summary>code</summary>
{{ cell.source | highlight_code(metadata=cell.metadata) }}
</details>
{%- endif %}
{% endblock input %}
{% block data_javascript %}{% endblock %}
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="{up}style.css">
</head>
<body>
{body}
</body>
</html>
"""


def write_page(nb: NotebookNode, result: Result, order: list[str], build: Path) -> None:
    """Write build/NAME.html, with links to the notebooks before and after it in `order`."""
    exporter = HTMLExporter(
        extra_loaders=[DictLoader({"loadlens.html.j2": TEMPLATE})],
        template_name="basic",
        template_file="loadlens.html.j2",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        anchor_link_text="#",
    )
    cells, _ = exporter.from_notebook_node(nb)
    # nbconvert's own embed_images would close a <details> before the text that it folds.
    folder = build.parent / "notebooks"
    cells = re.sub(r'(<img\b[^>]*\bsrc=")(?![a-z]+:)([^"]+)"', lambda match: _embedded(match, folder), cells)
    # Links between notebooks become links between pages.
    cells = re.sub(r'href="(?![a-z]+:)([^"#]+)\.ipynb(#[^"]*)?"', r'href="\1.html\2"', cells)
    up = "../" * result.name.count("/")
    at = order.index(result.name)
    before = _step(order[at - 1], up, "← ") if at else ""
    after = _step(order[at + 1], up, "", " →") if at + 1 < len(order) else ""
    steps = f'<nav><span>{before}</span><a href="{up}index.html">All notebooks</a><span>{after}</span></nav>'
    failed = f'<p class="failed">FAIL: {escape(result.why)}</p>' if result.why else ""
    body = f"{steps}\n<main>{failed}\n{cells}\n</main>\n{steps}"
    _write(build / f"{result.name}.html", PAGE.format(title=escape(result.title), up=up, body=body))
    css = HtmlFormatter(style="vs").get_style_defs(".highlight")
    _write(build / "style.css", CSS.read_text(encoding="utf-8") + "\n/* Pygments */\n" + css + "\n")


def write_index(results: list[Result], build: Path) -> None:
    """Write build/index.html over `results`, in their order."""
    entries = "\n".join(_entry(result) for result in results)
    body = (
        "<main><h1>Loadlens</h1>\n"
        "<p class='lead'>How vLLM loads weights, where that goes wrong, and what a fix changes:\n"
        "one question a notebook.</p>\n"
        f"<ol class='index'>\n{entries}\n</ol></main>"
    )
    _write(build / "index.html", PAGE.format(title="Loadlens", up="", body=body))


def _entry(result: Result) -> str:
    question = f"<p>{escape(result.question)}</p>" if result.question != result.title else ""
    why = f'<p class="why">{escape(result.why)}</p>' if result.why else ""
    title = f'<a href="{result.name}.html"><strong>{escape(result.title)}</strong></a>'
    meta = f'<p class="meta"><b>{result.outcome}</b> {result.seconds:.0f} s · {escape(result.name)}</p>'
    return f'<li class="{result.outcome.lower()}">{title}\n{question}{why}{meta}</li>'


def _embedded(match: re.Match[str], folder: Path) -> str:
    """Return an image's tag with the picture inside it; a picture that is not there stays a (broken) link."""
    path = folder / unquote(match[2])
    if not path.is_file():
        return match[0]
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f'{match[1]}data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"'


def _step(name: str, up: str, before: str = "", after: str = "") -> str:
    label = name.rsplit("/", 1)[-1].replace("_", " ")
    return f'<a href="{up}{name}.html">{before}{escape(label)}{after}</a>'


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
