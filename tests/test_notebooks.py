"""The workbook itself: every notebook runs from nothing but the environment, and says what its committed copy says."""

from __future__ import annotations

import copy

import pytest

from loadlens.stable import places_of
from loadlens.workbook import ROOT, execute, find, read_notebook, stabilise

pytestmark = pytest.mark.skipif(not (ROOT / "notebooks").is_dir(), reason="no notebooks beside this installation")


def said(nb) -> list[list[str]]:
    """What each code cell shows a reader, pictures as the fact that there is one."""
    def one(output) -> str:
        if "text" in output:
            return output.text
        shown = {kind: "a picture" if kind.startswith("image/") else data for kind, data in output.get("data", {}).items()}
        return "\n".join(f"{kind}: {shown[kind]}" for kind in sorted(shown))

    return [[one(output) for output in cell.outputs] for cell in nb.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", find(ROOT, []))
def test_a_notebook_runs_and_says_what_its_committed_copy_says(name):
    committed = read_notebook(ROOT / "notebooks" / f"{name}.ipynb")
    nb = copy.deepcopy(committed)
    result = execute(nb, name, ROOT / "notebooks")
    assert result.outcome == "PASS", result.why
    stabilise(nb, places_of(ROOT))
    assert said(nb) == said(committed)
