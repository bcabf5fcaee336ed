"""Execute the notebooks: into build/ with a site to read, or in place.

    $ python -m loadlens.workbook build
    00_start_here        PASS    12 s  (9 cells)
    01_issue_46078       FAIL    40 s  cell 17 of 38: AssertionError: expected 6 lost tensors, found 0

    notebook        question                                         outcome  seconds
    00_start_here   What happens when vLLM loads weights?            PASS          12
    01_issue_46078  Where did the indexer's FP8 pair go?             FAIL          40
    Read it: build/index.html

`build` leaves the tracked notebooks alone; `refresh` writes them, with outputs that stay the same when nothing
changed. Each notebook has its own kernel, started in notebooks/, and its own time limit.
Exit status: 0 all passed, 1 a notebook failed, 2 could not run (one sentence why).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from rich.console import Console
from rich.table import Table

from .errors import CannotRun
from .pages import write_index, write_page
from .stable import places_of, stabilise

__all__ = ["Result", "execute", "main", "read_notebook", "stabilise", "write_notebook"]

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT = 360.0


@dataclass
class Result:
    """How one notebook's execution ended; `execute` fills it."""

    # path below notebooks/ without its suffix, such as "01_issue_46078" or "exercises/01_order"
    name: str
    # the first H1, and metadata.loadlens.question or what stands in its place
    title: str
    question: str
    # PASS or FAIL
    outcome: str
    seconds: float
    cells: int
    # for a FAIL: the cell and the last line of its traceback
    why: str = ""


def read_notebook(path: Path) -> NotebookNode:
    """Read a notebook, giving cells without an id the same id each time."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        for number, cell in enumerate(raw["cells"]):
            cell.setdefault("id", f"cell-{number}")
        raw["nbformat_minor"] = max(5, raw["nbformat_minor"])
        nb = nbformat.reads(json.dumps(raw), as_version=4)
        nbformat.validate(nb)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise CannotRun(f"{path.name} is not a notebook ({type(error).__name__}); restore it from git") from error
    return nb


def write_notebook(path: Path, nb: NotebookNode) -> None:
    """Write a notebook whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(nbformat.writes(nb).rstrip("\n") + "\n", encoding="utf-8")
    draft.replace(path)


def title_and_question(nb: NotebookNode, name: str) -> tuple[str, str]:
    """Return the notebook's H1, and its question: metadata.loadlens.question, else the first line below the H1."""
    lines = [line.strip() for cell in nb.cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    lines = [line for line in lines if line]
    first = next((i for i, line in enumerate(lines) if line.startswith("# ")), None)
    title = lines[first][2:].strip() if first is not None else name
    question = nb.metadata.get("loadlens", {}).get("question", "")
    if not question and first is not None and first + 1 < len(lines) and not lines[first + 1].startswith("#"):
        question = re.sub(r"[*`]|\[([^]]*)\]\([^)]*\)", r"\1", lines[first + 1])
    return title, question or title


def execute(nb: NotebookNode, name: str, folder: Path, time_limit: float = TIME_LIMIT) -> Result:
    """Execute `nb` in place in a fresh kernel whose working directory is `folder`, showing progress.

    Whatever happens in the notebook is a Result; CannotRun means that no kernel starts at all.
    """
    return asyncio.run(_execute(nb, name, folder, time_limit))


async def _execute(nb: NotebookNode, name: str, folder: Path, time_limit: float) -> Result:
    title, question = title_and_question(nb, name)
    result = Result(name, title, question, "PASS", 0.0, len(nb.cells))
    began = time.monotonic()
    # Only this environment's own kernel: one registered in the user's home may be another Python.
    specs = KernelSpecManager(kernel_dirs=[os.path.join(sys.prefix, "share", "jupyter", "kernels")])
    # Over sockets in a private folder: no port is opened. The folder's path is short, as socket names must be.
    sockets = tempfile.TemporaryDirectory(prefix="lens")
    manager = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=specs,
        transport="ipc",
        connection_file=os.path.join(sockets.name, "kernel.json"),
    )
    client = NotebookClient(
        nb,
        km=manager,
        resources={"metadata": {"path": str(folder)}},
        timeout_func=lambda cell: max(0.1, time_limit - (time.monotonic() - began)),
        startup_timeout=60,
        record_timing=False,
        on_cell_start=lambda cell, cell_index: progress.at(cell_index),
    )
    progress = _Progress(name, len(nb.cells))
    ticker = asyncio.create_task(progress.tick())
    try:
        await client.async_execute(env=_kernel_environment())
    except CellTimeoutError:
        result.why = f"cell {progress.cell} of {result.cells}: over the notebook's limit of {time_limit:.0f} s"
    except DeadKernelError:
        result.why = f"cell {progress.cell} of {result.cells}: the kernel died"
    except CellExecutionError as error:
        last = f"{error.ename}: {error.evalue}".strip().splitlines()
        result.why = f"cell {progress.cell} of {result.cells}: {last[-1] if error.ename in last[-1] else last[0]}"
    except RuntimeError as error:
        if progress.cell:
            raise
        raise CannotRun(f"no Jupyter kernel starts in this environment ({error}); run make env") from error
    finally:
        ticker.cancel()
        # The kernel leads its own process group: what a stopped notebook started ends with it.
        group = getattr(manager.provisioner, "pgid", None)
        if group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        sockets.cleanup()
    result.seconds = round(time.monotonic() - began, 1)
    if result.why:
        result.outcome = "FAIL"
    progress.end(result)
    return result


def _kernel_environment() -> dict[str, str]:
    """Return the kernel's environment: the same order of sets each time, no progress bars, figures in the notebook."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MPLBACKEND", "PYTHONPATH")}
    return environment | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "COLUMNS": "100",
    }


class _Progress:
    """One line per notebook: rewritten each second on a terminal, repeated every 20 s elsewhere."""

    def __init__(self, name: str, cells: int) -> None:
        self.name, self.cells, self.cell = name, cells, 0
        self.began = time.monotonic()
        self.terminal = sys.stdout.isatty()

    def at(self, cell_index: int) -> None:
        self.cell = cell_index + 1

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(1 if self.terminal else 20)
            seconds = time.monotonic() - self.began
            line = f"{self.name:<20} cell {self.cell}/{self.cells}  {seconds:.0f} s"
            self._write(line, end="" if self.terminal else "\n")

    def end(self, result: Result) -> None:
        note = result.why or f"({result.cells} cells)"
        self._write(f"{self.name:<20} {result.outcome}  {result.seconds:4.0f} s  {note}")

    def _write(self, line: str, end: str = "\n") -> None:
        print(("\r\033[K" if self.terminal else "") + line, end=end, flush=True)


def find(root: Path, names: list[str]) -> list[str]:
    """Return the names of the notebooks below root/notebooks, all or those that `names` begin, in reading order."""
    folder = root / "notebooks"
    paths = sorted(folder.glob("*.ipynb")) + sorted((folder / "exercises").glob("**/*.ipynb"))
    paths = [path for path in paths if ".ipynb_checkpoints" not in path.parts]
    every = [path.relative_to(folder).with_suffix("").as_posix() for path in paths]
    if not every:
        raise CannotRun("there is no notebook in notebooks/; run this in a clone of the repository")
    if not names:
        return every
    chosen: set[str] = set()
    for wanted in names:
        stem = wanted.removeprefix("notebooks/").removesuffix(".ipynb")
        matches = [name for name in every if name.startswith(stem)]
        if not matches:
            raise CannotRun(f"there is no notebook {wanted}; there are {', '.join(every)}")
        chosen.update(matches)
    return [name for name in every if name in chosen]


def run(root: Path, action: str, names: list[str], time_limit: float) -> list[Result]:
    """Execute the named notebooks, write what `action` ("build" or "refresh") says, and return the results."""
    places, results = places_of(root), []
    known = _known(root) if action == "build" else {}
    names = find(root, names)
    order = [name for name in find(root, []) if name in known or name in names]
    for name in names:
        nb = read_notebook(root / "notebooks" / f"{name}.ipynb")
        result = execute(nb, name, root / "notebooks", time_limit)
        results.append(result)
        stabilise(nb, places)
        if action == "build":
            known[name] = result
            write_notebook(root / "build" / "notebooks" / f"{name}.ipynb", nb)
            write_page(nb, result, order, root / "build")
            write_index([known[name] for name in order if name in known], root / "build")
            record = json.dumps([asdict(item) for item in known.values()], indent=1)
            (root / "build" / "results.json").write_text(record, encoding="utf-8")
        elif result.outcome == "PASS":
            write_notebook(root / "notebooks" / f"{name}.ipynb", nb)
            _export_figures(nb, root / "data" / "figures")
    return results


def _export_figures(nb: NotebookNode, folder: Path) -> None:
    """Write the figure of each cell tagged `figure-NAME` to NAME.png: the README shows what a notebook computed."""
    for cell in nb.cells:
        for tag in cell.metadata.get("tags", ()):
            pictures = [o.data["image/png"] for o in cell.get("outputs", ()) if "image/png" in o.get("data", {})]
            if tag.startswith("figure-") and pictures:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{tag.removeprefix('figure-')}.png").write_bytes(base64.b64decode(pictures[-1]))


def _known(root: Path) -> dict[str, Result]:
    """Return the results of earlier builds, so that building one notebook keeps the others on the index."""
    try:
        results = [Result(**item) for item in json.loads((root / "build" / "results.json").read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return {}
    return {result.name: result for result in results}


def print_table(results: list[Result], action: str) -> None:
    """Print notebook, question, outcome and seconds, then where to look."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("notebook", "question", "outcome"):
        table.add_column(heading)
    table.add_column("seconds", justify="right")
    for result in results:
        colour = "green" if result.outcome == "PASS" else "bold red"
        table.add_row(result.name, result.question, f"[{colour}]{result.outcome}[/]", f"{result.seconds:.0f}")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print()
    console.print(table)
    for result in results:
        if result.why:
            console.print(f"{result.name}: {result.why}", markup=False, soft_wrap=True)
    if action == "build":
        console.print("Read it: build/index.html")
    elif any(result.why for result in results):
        console.print("A notebook that failed was left as it was.")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadlens.workbook", description="Execute the notebooks.")
    parser.add_argument("action", choices=["build", "refresh"], help="write build/, or the notebooks themselves")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the beginning of a notebook's name (default: all)")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, metavar="SECONDS", help="for each notebook")
    options = parser.parse_args(arguments)
    try:
        results = run(root, options.action, options.names, options.time_limit)
    except CannotRun as error:
        print(f"loadlens: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nloadlens: interrupted; finished notebooks are kept", file=sys.stderr)
        return 2
    print_table(results, options.action)
    return 1 if any(result.outcome == "FAIL" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
