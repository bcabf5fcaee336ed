"""What every fix is made of: sites, edits, and the two directions.

    >>> fix.apply(source)       # the text with the fix at every site
    >>> fix.revert(source)      # the text with the fix taken back; revert(apply(source)) == source, byte for byte

A fix recognises code by its structure (libcst), not by line number, so it works on any release whose code has that
structure. It is written as edits of byte ranges, so whatever it does not mean to change keeps its bytes.

To add a fix: subclass `Fix`, fill in the five texts, write `find`, and add an instance to `FIXES`. A fix may concern
several files and several places in each: `find` is given one file at a time and returns every place it recognises.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

__all__ = ["ABSENT", "NOT_APPLICABLE", "PRESENT", "Edit", "Fix", "FixSite", "Found", "Parsed", "Site", "as_in",
           "ends_with", "insert", "line_at", "read_source", "remove", "top_level"]

PRESENT, ABSENT, NOT_APPLICABLE = "present", "absent", "not applicable"


@dataclass(frozen=True)
class Site:
    """One place in one file that a fix concerns."""

    # 1-based line on which the place starts
    line: int
    # "Class.method", "function" or, at module level, the variable that holds it
    where: str
    # PRESENT or ABSENT: is the fix there?
    state: str
    # the variable, or whatever else the fix calls the place by
    name: str


@dataclass(frozen=True)
class FixSite:
    """One place in a whole vLLM package that a fix concerns, or a file it knows by name and does not concern."""

    # a key of FIXES
    fix: str
    # relative to the vllm package, with forward slashes
    file: str
    # 1-based; None when not applicable
    line: int | None
    # PRESENT, ABSENT or NOT_APPLICABLE
    state: str
    # as Site.where; when not applicable, the reason
    where: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{self.fix}  {self.state:<14}  {place}  {self.where}"


@dataclass(frozen=True)
class Edit:
    """Replace the bytes [start, end) of a file by `text`."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Found:
    """A site with the edits that bring it into its other state."""

    site: Site
    edits: tuple[Edit, ...]


class Fix:
    """A change of vLLM's source, in both directions; subclasses write `find` and fill in the texts."""

    # the word used in a variant's spec; lower case
    name: str
    title: str
    url: str
    # what goes wrong without it, in one or two sentences
    summary: str
    # files it is known to concern, relative to the vllm package; survey() lists them even when a release lacks them
    known: tuple[str, ...] = ()
    # folders of the vllm package in which to look for more
    look_in: tuple[str, ...] = ("model_executor", "models")
    # a file without this text cannot hold a site; spares a parse of each file
    text: re.Pattern[bytes]

    def find(self, data: bytes) -> Sequence[Found]:
        """Return every site in one file's bytes (UTF-8), in any order."""
        raise NotImplementedError

    def files(self, root: Path) -> list[str]:
        """Return the sorted files under `root`/vllm that hold at least one site, relative to the vllm package."""
        package = Path(root) / "vllm"
        paths = {package / known for known in self.known}
        for folder in self.look_in:
            paths.update((package / folder).rglob("*.py"))
        hits = (path for path in paths if path.is_file() and self.text.search(path.read_bytes()))
        return sorted(path.relative_to(package).as_posix() for path in hits if self.sites(read_source(path)))

    def sites(self, source: str) -> list[Site]:
        """Return the sites in one file's text, by line."""
        return sorted((found.site for found in _find(self, source)), key=lambda site: site.line)

    def state(self, source: str) -> str:
        """Return ABSENT when there is something left to apply, else PRESENT, else NOT_APPLICABLE."""
        states = {site.state for site in self.sites(source)}
        return ABSENT if ABSENT in states else PRESENT if states else NOT_APPLICABLE

    def apply(self, source: str) -> str:
        """Return the text with the fix at every site; the same text when there is nothing to do."""
        return self._toggle(source, ABSENT)

    def revert(self, source: str) -> str:
        """Return the text with the fix taken back at every site; the same text when there is nothing to do."""
        return self._toggle(source, PRESENT)

    def _toggle(self, source: str, state: str) -> str:
        data = source.encode()
        edits = [edit for found in _find(self, source) if found.site.state == state for edit in found.edits]
        for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):  # from the end: offsets stay true
            data = data[:edit.start] + edit.text + data[edit.end:]
        return data.decode()


@lru_cache(maxsize=256)  # a parse takes up to half a second, and a survey and a variant ask for the same files
def _find(fix: Fix, source: str) -> tuple[Found, ...]:
    data = source.encode()
    return tuple(fix.find(data)) if fix.text.search(data) else ()


def top_level(data: bytes, text: re.Pattern[bytes]) -> Iterator[tuple[int, int]]:
    """Return the byte ranges of a module's top-level statements that contain `text`; whole lines, no decorators.

    Parsing one class takes a tenth of parsing its file with libcst. What is not parsed is never changed.
    """
    offsets = [0, *accumulate(len(line) for line in data.splitlines(keepends=True))]
    for node in ast.parse(data).body:
        start, end = offsets[node.lineno - 1], offsets[node.end_lineno]
        if text.search(data, start, end):
            yield start, end


class Parsed:
    """Some lines of a file, as libcst sees them, with the byte range in the whole file of each node."""

    def __init__(self, data: bytes, start: int, end: int) -> None:
        wrapper = MetadataWrapper(cst.parse_module(data[start:end]), unsafe_skip_copy=True)
        self.module = wrapper.module
        self._start, self._spans = start, wrapper.resolve(ByteSpanPositionProvider)

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return [start, end) of a node in the file, without the white space and comments around it."""
        span = self._spans[node]
        return self._start + span.start, self._start + span.start + span.length


def line_at(data: bytes, offset: int) -> int:
    """Return the 1-based line that a byte of a file is on."""
    return data.count(b"\n", 0, offset) + 1


def as_in(data: bytes, text: str) -> bytes:
    """Return text as bytes with the line ending that the file has."""
    return text.encode().replace(b"\n", b"\r\n" if b"\r\n" in data else b"\n")


def ends_with(data: bytes, end: int, text: str) -> bool:
    """Does the file have this text right before `end`?"""
    return data.endswith(as_in(data, text), 0, end)


def insert(data: bytes, at: int, text: str) -> Edit:
    """Return the edit that puts text at `at`."""
    return Edit(at, at, as_in(data, text))


def remove(data: bytes, end: int, text: str) -> Edit:
    """Return the edit that removes the text right before `end`."""
    return Edit(end - len(as_in(data, text)), end, b"")


def read_source(path: Path) -> str:
    """Read a source file, keeping its line endings as they are."""
    return path.read_bytes().decode()
