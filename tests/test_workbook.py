"""The notebook runner on tiny notebooks, and the rules that the tracked notebooks keep."""

import re
import statistics
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from loadlens import workbook
from loadlens.stable import places_of, stabilise, stable_text

ROOT = Path(__file__).resolve().parents[1]
TRACKED = sorted(path for path in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)

# One cell per thing that differs between two executions.
UNSTABLE_CELLS = [
    "import os, sys, tempfile\nprint('pid', os.getpid(), object())",
    "print(os.getcwd(), tempfile.mkdtemp())",
    "for i in range(3):\n    print(f'\\r {33 * i}%|###   | {i}/3 [00:00<00:00, 3.1it/s]', end='', file=sys.stderr)",
    "import warnings\nwarnings.warn('careful')",
    "os.path.abspath('x.txt')",
    "",
    "{'a', 'b', 'c', 'd', 'e'}",
]


def a_workbook(folder: Path, **notebooks: list[str]) -> Path:
    """Make folder/notebooks with one notebook per keyword, of a title cell and these code cells."""
    (folder / "notebooks").mkdir()
    for name, sources in notebooks.items():
        head = new_markdown_cell(f"# The title of {name}\n\n*Does it `run`?* See [two](two.ipynb#end).", id="head")
        cells = [new_code_cell(source, id=f"c{i}") for i, source in enumerate(sources)]
        nbformat.write(new_notebook(cells=[head, *cells]), folder / "notebooks" / f"{name}.ipynb")
    return folder


def texts_of(nb: nbformat.NotebookNode) -> list[str]:
    """Return every text that a reader of the outputs sees."""
    texts = []
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            texts += [output.get("text", ""), *output.get("traceback", [])]
            texts += [str(data) for mime, data in output.get("data", {}).items() if not mime.startswith("image/png")]
    return texts


def test_refresh_twice_gives_the_same_bytes_and_no_trace_of_this_machine(tmp_path):
    root = a_workbook(tmp_path, one=UNSTABLE_CELLS)
    path = root / "notebooks" / "one.ipynb"
    assert workbook.main(["refresh"], root) == 0
    first = path.read_bytes()
    assert workbook.main(["refresh"], root) == 0
    assert path.read_bytes() == first

    nb = workbook.read_notebook(path)
    text = "\n".join(texts_of(nb))
    assert "pid N <object object at 0x…>" in text
    assert "notebooks tmp/…" in text and "'notebooks/x.txt'" in text
    assert "UserWarning: careful" in text
    assert str(tmp_path) not in text and "it/s" not in text
    assert [cell.execution_count for cell in nb.cells[1:]] == [1, 2, 3, 4, 5, None, 6]
    assert [cell.id for cell in nb.cells] == ["head", "c0", "c1", "c2", "c3", "c4", "c5", "c6"]


def test_build_leaves_the_notebooks_alone_and_writes_a_site_that_needs_no_network(tmp_path, capsys):
    root = a_workbook(tmp_path, one=["print('hello')"], two=["import matplotlib.pyplot as plt\nplt.plot([1, 2]);"])
    before = {path.name: path.read_bytes() for path in (root / "notebooks").iterdir()}
    assert workbook.main(["build"], root) == 0
    assert {path.name: path.read_bytes() for path in (root / "notebooks").iterdir()} == before

    printed = capsys.readouterr().out
    assert re.search(r"^one +Does it run\? See two\. +PASS +\d+$", printed, re.MULTILINE)
    assert printed.endswith("Read it: build/index.html\n")
    page, index = (root / "build" / "one.html").read_text(), (root / "build" / "index.html").read_text()
    assert "hello" in page and '<details class="code" open' in page
    assert 'href="two.html#end"' in page and ">two →</a>" in page
    assert 'src="data:image/png;base64,' in (root / "build" / "two.html").read_text()
    assert 'href="one.html"' in index and "The title of two" in index and "PASS" in index
    for path in (root / "build").rglob("*.html"):
        html = path.read_text()
        assert not re.search(r"<script|(src|<link[^>]*href)=\"(https?:)?//|@import", html), path.name
        assert (path.parent / "style.css").exists()
    assert workbook.read_notebook(root / "build" / "notebooks" / "one.ipynb").cells[1].outputs[0].text == "hello\n"


def test_a_page_folds_solutions_and_holds_its_pictures(tmp_path):
    root = a_workbook(tmp_path, one=["1"])
    (root / "notebooks" / "dot.svg").write_text("<svg/>")
    path = root / "notebooks" / "one.ipynb"
    nb = workbook.read_notebook(path)
    solution = "<details><summary>Solution</summary>\n\nTwo *calls*.\n\n</details>"
    nb.cells.append(new_markdown_cell(f"![a dot](dot.svg)\n\n{solution}"))
    nb.cells[1].metadata = {"jupyter": {"source_hidden": True}}
    workbook.write_notebook(path, nb)
    assert workbook.main(["build"], root) == 0
    page = (root / "build" / "one.html").read_text()
    assert re.search(r"<summary>Solution</summary>\s*<p>Two <em>calls</em>.</p>\s*</details>", page)
    assert 'src="data:image/svg+xml;base64,' in page
    assert re.search(r'<details class="code" ?>', page), "a hidden source starts folded"


def test_building_one_notebook_keeps_the_others_on_the_index(tmp_path):
    root = a_workbook(tmp_path, one=["1"], two=["2"])
    assert workbook.main(["build", "one"], root) == 0
    assert not (root / "build" / "two.html").exists()
    assert workbook.main(["build", "two"], root) == 0
    index = (root / "build" / "index.html").read_text()
    assert 'href="one.html"' in index and 'href="two.html"' in index


def test_a_failing_cell_is_named_and_the_tracked_notebook_kept(tmp_path, capsys):
    root = a_workbook(tmp_path, bad=["x = 1", "assert x == 2, 'x is one'", "print('never')"])
    before = (root / "notebooks" / "bad.ipynb").read_bytes()
    assert workbook.main(["refresh"], root) == 1
    assert (root / "notebooks" / "bad.ipynb").read_bytes() == before
    assert "bad: cell 3 of 4: AssertionError: x is one" in capsys.readouterr().out
    assert workbook.main(["build"], root) == 1
    assert "FAIL: cell 3 of 4: AssertionError: x is one" in (root / "build" / "bad.html").read_text()


def test_a_notebook_over_its_time_limit_fails(tmp_path, capsys):
    root = a_workbook(tmp_path, slow=["import time\ntime.sleep(60)"])
    assert workbook.main(["build", "--time-limit", "3"], root) == 1
    assert "slow: cell 2 of 2: over the notebook's limit of 3 s" in capsys.readouterr().out


def test_a_kernel_that_dies_fails_the_notebook(tmp_path, capsys):
    root = a_workbook(tmp_path, dead=["import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"])
    assert workbook.main(["build"], root) == 1
    assert "dead: cell 2 of 2: the kernel died" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "content", "says"),
    [
        (["build", "nine"], None, "there is no notebook nine; there are one"),
        (["build"], "{", "one.ipynb is not a notebook"),
        (["build"], '{"cells": 3}', "one.ipynb is not a notebook"),
    ],
)
def test_what_can_not_run_is_one_sentence_and_exit_2(tmp_path, capsys, arguments, content, says):
    root = a_workbook(tmp_path, one=["1"])
    if content is not None:
        (root / "notebooks" / "one.ipynb").write_text(content)
    assert workbook.main(arguments, root) == 2
    error = capsys.readouterr().err
    assert error.startswith("loadlens: ") and says in error and error.count("\n") == 1


def test_no_notebooks_is_exit_2(tmp_path, capsys):
    assert workbook.main(["build"], tmp_path) == 2
    assert "no notebook in notebooks/" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<Worker pid=4711 at 0x7f3a5c0d1e20>", "<Worker pid=N at 0x…>"),
        ("poison 0x7fc0dead stays", "poison 0x7fc0dead stays"),
        ("/srv/lens/lib/loadlens/run.py:3, /srv/lens, /srv/lens2", "lib/loadlens/run.py:3, ., /srv/lens2"),
        ("file:///srv/lens/build/index.html", "file://build/index.html"),
        ("INFO 12-01 09:08:07 [loader.py:12] Loading", "INFO [loader.py:12] Loading"),
        ("/tmp/ipykernel_99/123.py:1: UserWarning", "cell.py:1: UserWarning"),
        (str(Path.home() / "x"), "~/x"),
        ("model.layers.0.self_attn", "model.layers.0.self_attn"),
    ],
)
def test_stable_text(text, shown):
    assert stable_text(text, places_of(Path("/srv/lens"))) == shown


def test_stabilise_drops_widgets_and_orders_streams(tmp_path):
    widget = new_output("display_data", {"text/plain": "Dropdown()", "application/vnd.jupyter.widget-view+json": {}})
    streams = [new_output("stream", name=name, text=f"{name} {i}\n") for i in (1, 2) for name in ("stderr", "stdout")]
    nb = new_notebook(cells=[new_code_cell("f()", outputs=[widget, *streams])], metadata={"widgets": {"state": {}}})
    nb.cells[0].metadata = {"execution": {"iopub.execute_input": "now"}, "tags": ["keep"]}
    nb.metadata.loadlens = {"question": "Why?"}
    stabilise(nb, places_of(tmp_path))
    assert "widgets" not in nb.metadata and nb.metadata.loadlens.question == "Why?"
    assert nb.cells[0].metadata == {"tags": ["keep"]}
    assert [output.text for output in nb.cells[0].outputs] == ["stdout 1\nstdout 2\n", "stderr 1\nstderr 2\n"]


# The rules of the tracked notebooks (shared style, 15 and 19).


@pytest.mark.parametrize("path", TRACKED, ids=lambda path: path.stem)
def test_a_tracked_notebook_keeps_the_rules(path):
    nb = workbook.read_notebook(path)
    code = [cell for cell in nb.cells if cell.cell_type == "code" and cell.source.strip()]
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "not executed; run make notebooks"
    lines = [len(cell.source.strip().splitlines()) for cell in code]
    assert max(lines) <= 15, f"a cell of {max(lines)} lines; its logic belongs in lib/"
    assert statistics.median(lines) <= 4
    roots = "home|root|work|tmp|Users|usr|opt|var|mnt|private|srv"
    for text in texts_of(nb):
        leak = re.search(rf"(?<![\w/.~:…-])/({roots})/|\b0x(7f|5[5-7])[0-9a-f]{{10}}\b", text)
        assert not leak, f"an output shows {text[max(0, leak.start() - 40):leak.end() + 40]!r}"
