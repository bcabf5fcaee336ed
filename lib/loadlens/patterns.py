"""Tensor names with their numbers collapsed, so that 78 layers read as one line.

    collapse(["model.layers.0.wk.weight", "model.layers.1.wk.weight", "model.layers.2.wk.weight"])
    ->  [("model.layers.{0..2}.wk.weight", 3)]
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["collapse", "layer_of", "ranges"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: `0..2,5`."""
    out: list[list[int]] = []
    for n in sorted(set(numbers)):
        if out and n == out[-1][1] + 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in out)


def layer_of(name: str) -> int | None:
    """Return the first number in a dotted name, which is its layer; None when there is none."""
    found = _NUMBER.search(name)
    return int(found.group()) if found else None


def collapse(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return (pattern, how many names) in order of first appearance; every number position becomes a range."""
    groups: dict[str, list[list[int]]] = {}
    counts: dict[str, int] = {}
    for name in names:
        key = _NUMBER.sub("#", name)
        groups.setdefault(key, []).append([int(n) for n in _NUMBER.findall(name)])
        counts[key] = counts.get(key, 0) + 1
    out = []
    for key, rows in groups.items():
        parts = key.split("#")
        text = parts[0]
        for i, part in enumerate(parts[1:]):
            numbers = ranges(row[i] for row in rows)
            text += (numbers if numbers.isdigit() else "{" + numbers + "}") + part
        out.append((text, counts[key]))
    return out
