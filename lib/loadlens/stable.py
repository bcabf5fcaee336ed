"""Notebook outputs that do not change when nothing changed.

    stable_text("<Worker pid=4711 at 0x7f3a5c0d1e20> in REPOSITORY/lib/loadlens/run.py", places)
    ->  "<Worker pid=N at 0x…> in lib/loadlens/run.py"

`stabilise(nb)` does this to every text in a notebook and removes what belongs to one execution: timings, kernel
versions, widget state, progress bars. Two executions of unchanged code then give the same bytes.

What it can not make stable: wall times and random numbers that a cell prints, and SVG figures (use PNG).
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

__all__ = ["Places", "places_of", "stabilise", "stable_text"]

# (absolute path, what a reader sees instead), most specific first
Places = list[tuple[str, str]]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# A widget without its kernel is an empty box or its Python repr; the notebook shows a static twin beside it.
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}

_PATTERNS: list[tuple[re.Pattern[str], str]] = [
    # "object at 0x55d0", and bare addresses of the heap or of mapped memory; a poison pattern such as 0x7fc0dead stays
    (re.compile(r"\bat 0x[0-9a-fA-F]+"), "at 0x…"),
    (re.compile(r"\b0x(?:7f|5[5-7])[0-9a-fA-F]{10}\b"), "0x…"),
    (re.compile(r"\b(pid|process id)(\s?[=:]\s?|\s)\d+", re.IGNORECASE), r"\1\2N"),
    (re.compile(r"[\w/.~-]*\bipykernel_\d+/\d+\.py"), "cell.py"),
    # vLLM's log lines carry date and time
    (re.compile(r"\b(DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d"), r"\1"),
    # pandas' Styler names each table at random
    (re.compile(r"\bT_[0-9a-f]{5}(?=[_\"\s])"), "T_table"),
]
_PROGRESS_BAR = re.compile(r"\d+%\|.*\||\d(?:it|s)/(?:s|it)\b|\b(?:it|B)/s\]")


def places_of(root: Path) -> Places:
    """Return the folders of this machine that must not show in a text, with what to show instead.

    root is the folder that holds `notebooks/`; paths below it become relative to it.
    """
    cache = os.environ.get("LOADLENS_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "loadlens"
    )
    pairs = [
        (sysconfig.get_path("purelib"), "site-packages"),
        (os.path.join(os.path.abspath(cache), ""), "~/.cache/loadlens/"),
        (os.path.join(str(root), ""), ""),
        (str(root), "."),
        (sys.prefix, ".venv"),
        (sys.base_prefix, "python"),
        (os.path.expanduser("~"), "~"),
        (tempfile.gettempdir(), "tmp"),
        ("/tmp", "tmp"),
    ]
    # A home of "/" (some containers) would eat every path.
    pairs = [(path, shown) for path, shown in pairs if len(Path(path).parts) > 1]
    resolved = [(os.path.realpath(path) + ("/" if path.endswith("/") else ""), shown) for path, shown in pairs]
    return sorted(dict(resolved[::-1] + pairs[::-1]).items(), key=lambda pair: -len(pair[0]))


def stable_text(text: str, places: Places) -> str:
    """Return `text` without absolute paths, process ids, object addresses and log times."""
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    for path, shown in places:
        end = "" if path.endswith("/") else r"(?![\w-])"
        text = re.sub(r"(?<![\w.~-])" + re.escape(path) + end, lambda _, shown=shown: shown, text)
    # names made by tempfile
    return re.sub(r"\btmp/(?:tmp)?[a-z0-9_]{8}\b", "tmp/…", text)


def stabilise(nb: NotebookNode, places: Places) -> NotebookNode:
    """Remove from `nb`, in place, what belongs to one execution only; return it.

    Cell ids, tags and `metadata.loadlens` are kept. Execution counts become 1..n over the code cells that have code.
    """
    nb.metadata.pop("widgets", None)
    nb.metadata["kernelspec"] = NotebookNode(KERNELSPEC)
    nb.metadata["language_info"] = NotebookNode(name="python", file_extension=".py", mimetype="text/x-python")
    count = 0
    for cell in nb.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        has_code = bool(cell.source.strip())
        count += has_code
        cell.execution_count = count if has_code else None
        cell.outputs = [_stable_output(output, places) for output in _tidy(cell.outputs)]
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
    return nb


def _tidy(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    """Drop widgets and progress bars; join the chunks of stdout, then of stderr, between two other outputs.

    How a stream is cut into chunks, and how the two interleave, is a matter of timing.
    """
    kept: list[NotebookNode] = []
    streams: dict[str, NotebookNode] = {}

    def flush() -> None:
        for name in sorted(streams, reverse=True):  # stdout before stderr
            text = _without_progress(streams[name].text)
            if text.strip():
                kept.append(NotebookNode(output_type="stream", name=name, text=text))
        streams.clear()

    for output in outputs:
        if output.output_type == "stream":
            if output.name in streams:
                streams[output.name].text += output.text
            else:
                streams[output.name] = NotebookNode(output)
            continue
        flush()
        if WIDGET_VIEW not in output.get("data", {}):
            kept.append(output)
    flush()
    return kept


def _without_progress(text: str) -> str:
    """Return what a terminal would show of `text` at the end, less the lines that are progress bars."""
    lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n")]
    return "\n".join(line for line in lines if not _PROGRESS_BAR.search(line))


def _stable_output(output: NotebookNode, places: Places) -> NotebookNode:
    if output.output_type == "stream":
        output.text = stable_text(output.text, places)
    elif output.output_type == "error":
        output.evalue = stable_text(output.evalue, places)
        output.traceback = [stable_text(line, places) for line in output.traceback]
    else:
        output.data = NotebookNode({mime: _stable_data(mime, data, places) for mime, data in output.data.items()})
    return output


def _stable_data(mime: str, data: Any, places: Places) -> Any:
    if isinstance(data, str) and (mime.startswith("text/") or mime == "image/svg+xml"):
        return stable_text(data, places)
    if mime.endswith("json"):
        return _stable_json(data, places)
    return data


def _stable_json(value: Any, places: Places) -> Any:
    if isinstance(value, str):
        return stable_text(value, places)
    if isinstance(value, dict):
        return {key: _stable_json(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [_stable_json(item, places) for item in value]
    return value
