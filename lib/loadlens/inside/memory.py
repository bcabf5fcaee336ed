"""Which delivered tensor does each byte of memory hold?

    memory.content(parameter)  ->  [(0, 32768, {2, 57}), (32768, 33792, {58})]     elements, deliveries

Memory is named by storage, pinned so that its address is not used again while an entry stands, and by byte
range within it. What a range holds is a *node*: a leaf (one delivery; a constant; memory that nobody wrote) or
the union of other nodes. Works on the meta device, where tensors have storages but no bytes.

Element-wise moves carry a source's boundaries along; other operations give the whole result the union of
their inputs. Writes that never pass torch's dispatcher (numpy, memmove, another thread) are not seen here:
the poison check in `record.py` is for those.
"""

from __future__ import annotations

import bisect

import numpy as np
import torch

__all__ = ["CONSTANT", "Memory", "byte_range"]

CONSTANT = 0  # the node of values that the code made up: zeros, padding, scalars
MAX_RUNS = 1 << 16  # a strided write of more runs than this is noted as imprecise, not followed

_storage_id = torch._C._storage_id


def byte_range(t: torch.Tensor) -> tuple[int, int]:
    """Return the first and one past the last byte that `t` can touch in its storage."""
    size = t.element_size()
    start = t.storage_offset() * size
    if t.is_contiguous():
        return start, start + t.numel() * size
    if not t.numel():
        return start, start
    return start, start + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))) * size


def _runs(t: torch.Tensor) -> np.ndarray | None:
    """Byte offsets at which the contiguous runs of a strided `t` start, and their common length; None if too many."""
    size = t.element_size()
    dims = sorted((s, n) for n, s in zip(t.shape, t.stride()) if n > 1)
    run = 1
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    count = int(np.prod([n for _, n in dims], dtype=object)) if dims else 1
    if count > MAX_RUNS or any(s == 0 for s, _ in dims):
        return None
    base = np.zeros(1, np.int64)
    for stride, n in reversed(dims):
        base = (base[:, None] + np.arange(n, dtype=np.int64) * stride).ravel()
    starts = np.sort((base + t.storage_offset()) * size)
    return np.stack([starts, starts + run * size])


class Memory:
    """Follow delivered tensors through storages, as unions of leaves."""

    def __init__(self) -> None:
        # node -> int for a leaf (delivery >= 0, else a negative label below), or the pair of nodes it joins
        self.parents: list[int | tuple[int, int]] = [-1]
        self.labels: list[str] = ["a constant"]  # label of leaf value -1, -2, ...
        # storage -> what all of it holds, or the byte ranges that differ
        self.whole: dict[int, int] = {}
        self.pieces: dict[int, list[tuple[int, int, int]]] = {}
        self.imprecise: set[int] = set()  # storages with a strided write of too many runs
        self._pins: dict[int, int] = {}
        self._joined: dict[tuple[int, int], int] = {}
        self._leaves: dict[int, frozenset[int]] = {}

    # ------------------------------------------------------------------ nodes

    def delivery(self, index: int) -> int:
        """Make the node of one delivered tensor."""
        self.parents.append(index)
        return len(self.parents) - 1

    def unwritten(self, label: str) -> int:
        """Make the node of memory that nobody has written yet; `label` says whose."""
        self.labels.append(label)
        self.parents.append(-len(self.labels))
        return len(self.parents) - 1

    def join(self, a: int | None, b: int | None) -> int | None:
        """Return the node of a value made from both; None stands for a value of unknown, undelivered origin."""
        if a is None or a == b:
            return b
        if b is None:
            return a
        key = (a, b) if a < b else (b, a)
        node = self._joined.get(key)
        if node is None:
            node = self._joined[key] = len(self.parents)
            self.parents.append(key)
        return node

    def leaves(self, node: int) -> frozenset[int]:
        """Return the leaf values below a node: deliveries (>= 0), the constant (-1), unwritten memory (< -1)."""
        known = self._leaves.get(node)
        if known is None:
            found, seen, todo = set(), set(), [node]
            while todo:
                n = todo.pop()
                if n in seen:
                    continue
                seen.add(n)
                p = self.parents[n]
                if isinstance(p, int):
                    found.add(p)
                else:
                    todo.extend(p)
            known = self._leaves[node] = frozenset(found)
        return known

    # ------------------------------------------------------------------ reading

    def pin(self, t: torch.Tensor) -> int:
        """Return the name of `t`'s storage, keeping its address from being used for another."""
        s = _storage_id(t)
        if s not in self._pins:
            self._pins[s] = t.untyped_storage()._weak_ref()
        return s

    def expired(self, storage: int) -> bool:
        """Say whether nothing holds this storage any more."""
        return storage in self._pins and torch.UntypedStorage._expired(self._pins[storage])

    def node(self, t: torch.Tensor) -> int | None:
        """Return the one node for all that `t` holds; None when nothing is known of its memory."""
        s = _storage_id(t)
        pieces = self.pieces.get(s)
        if pieces is None:
            return self.whole.get(s)
        start, end = byte_range(t)
        found = None
        for i in range(self._first(pieces, start), len(pieces)):
            a, _, node = pieces[i]
            if a >= end:
                break
            found = self.join(found, node)
        return found

    def spans(self, t: torch.Tensor) -> list[tuple[int, int, int]]:
        """Return (first byte, past the last byte, node) over all of `t`'s range, counted from its own start.

        Bytes of which nothing is known were made by the code, not delivered: they hold a constant.
        """
        s = _storage_id(t)
        start, end = byte_range(t)
        if start == end:
            return []
        pieces = self.pieces.get(s)
        if pieces is None:
            return [(0, end - start, self.whole.get(s, CONSTANT))]
        out: list[tuple[int, int, int]] = []
        at = start
        for i in range(self._first(pieces, start), len(pieces)):
            a, b, node = pieces[i]
            if a >= end:
                break
            if a > at:
                out.append((at - start, a - start, CONSTANT))
            a, at = max(a, start), min(b, end)
            if out and out[-1][2] == node:
                out[-1] = (out[-1][0], at - start, node)
            else:
                out.append((a - start, at - start, node))
        if at < end:
            out.append((at - start, end - start, CONSTANT))
        return out

    def content(self, t: torch.Tensor) -> list[tuple[int, int, frozenset[int]]]:
        """Return (first element, past the last element, leaves) over a contiguous `t`."""
        size = t.element_size()
        out: list[tuple[int, int, frozenset[int]]] = []
        for a, b, node in self.spans(t):
            # a byte range may end inside an element when types were mixed; round so that nothing is hidden
            first, last, leaves = a // size, -(-b // size), self.leaves(node)
            if out and out[-1][2] == leaves and out[-1][1] >= first:
                out[-1] = (out[-1][0], last, leaves)
            else:
                out.append((first, last, leaves))
        return out

    # ------------------------------------------------------------------ writing

    def set_all(self, t: torch.Tensor, node: int) -> None:
        """Say that the whole storage of `t` holds `node`."""
        s = self.pin(t)
        self.pieces.pop(s, None)
        self.whole[s] = node

    def write(self, t: torch.Tensor, node: int | None) -> None:
        """Say that `t`'s elements, and no other bytes, now hold `node`."""
        s = self.pin(t)
        if not t.numel():
            return
        node = CONSTANT if node is None else node
        start, end = byte_range(t)
        total = t.untyped_storage().nbytes()
        if t.is_contiguous():
            if start == 0 and end >= total:
                self.pieces.pop(s, None)
                self.whole[s] = node
            else:
                self._bind(s, start, end, node, total)
            return
        runs = _runs(t)
        if runs is None:  # keep what was there as well, and say so
            self.imprecise.add(s)
            self._bind(s, start, end, self.join(self.node(t), node), total)
            return
        if runs.shape[1] <= 8:
            for a, b in runs.T.tolist():
                self._bind(s, a, b, node, total)
        else:
            self._bind_many(s, runs, node, total)

    def move(self, dst: torch.Tensor, src: torch.Tensor, extra: int | None = None) -> bool:
        """Carry `src`'s byte boundaries over to `dst`, element for element; False when the two don't line up.

        `extra` is joined to every piece: another input that took part in the value.
        """
        n = src.numel()
        if n != dst.numel() or n == 0 or not src.is_contiguous() or not dst.is_contiguous():
            return False
        a_size, b_size = src.element_size(), dst.element_size()
        base = dst.storage_offset() * b_size
        s, total = self.pin(dst), dst.untyped_storage().nbytes()
        for a, b, node in self.spans(src):
            joined = self.join(node, extra)
            self._bind(s, base + a // a_size * b_size, base + -(-b // a_size) * b_size, joined, total)
        return True

    def is_split(self, t: torch.Tensor) -> bool:
        """Say whether `t`'s storage holds different things in different places."""
        return _storage_id(t) in self.pieces

    @staticmethod
    def _first(pieces: list[tuple[int, int, int]], start: int) -> int:
        i = bisect.bisect_right(pieces, (start,))
        return i - 1 if i and pieces[i - 1][1] > start else i

    def _open(self, s: int, total: int) -> list[tuple[int, int, int]]:
        pieces = self.pieces.get(s)
        if pieces is None:
            whole = self.whole.pop(s, None)
            pieces = self.pieces[s] = [] if whole is None else [(0, total, whole)]
        return pieces

    def _bind(self, s: int, start: int, end: int, node: int, total: int) -> None:
        pieces = self._open(s, total)
        if not pieces or pieces[-1][1] <= start:
            pieces.append((start, end, node))
            return
        i = j = self._first(pieces, start)
        new = []
        while j < len(pieces) and pieces[j][0] < end:
            a, b, old = pieces[j]
            if a < start:
                new.append((a, start, old))
            if b > end:
                new.append((end, b, old))
            j += 1
        new.append((start, end, node))
        new.sort()
        pieces[i:j] = new

    def _bind_many(self, s: int, runs: np.ndarray, node: int, total: int) -> None:
        """Bind many sorted, disjoint runs in one pass over the pieces."""
        old, out, i = self._open(s, total), [], 0
        for start, end in runs.T.tolist():
            while i < len(old) and old[i][1] <= start:
                out.append(old[i])
                i += 1
            if i < len(old) and old[i][0] < start:
                out.append((old[i][0], start, old[i][2]))
            while i < len(old) and old[i][1] <= end:
                i += 1
            if out and out[-1][1] == start and out[-1][2] == node:
                out[-1] = (out[-1][0], end, node)
            else:
                out.append((start, end, node))
            if i < len(old) and old[i][0] < end:
                old[i] = (end, old[i][1], old[i][2])
        out.extend(old[i:])
        self.pieces[s] = out
