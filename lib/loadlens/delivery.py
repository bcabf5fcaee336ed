"""How the tensors of a checkpoint reach `load_weights`: in which order, in how many calls, out of whose buffer.

    Delivery.parse("file").calls(checkpoint)                 ->  (("…0.…weight_scale_inv", …, "lm_head.weight", …),)
    Delivery.parse("per-tensor,reused-buffer").sentence      ->  "one call per tensor, sorted by name, out of one reused buffer"

A new order is one function from a checkpoint to calls, with a line in `ORDERS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .checkpoint import Checkpoint
from .errors import CannotRun

__all__ = ["Delivery", "GRAMMAR", "ORDERS"]

Calls = tuple[tuple[str, ...], ...]

GRAMMAR = "sorted, file, state-dict, per-tensor, per-file, shuffled:SEED, split:TENSOR or runai, each with an optional ,reused-buffer"


def _sorted(checkpoint: Checkpoint, _: str) -> Calls:
    """One call; files by name and names sorted within each, as vLLM's default loader reads them."""
    return (tuple(t.name for t in sorted(checkpoint.tensors, key=lambda t: (t.file, t.name))),)


def _file(checkpoint: Checkpoint, _: str) -> Calls:
    """One call; tensors as they lie in the files, by offset, as streaming loaders deliver them."""
    return (tuple(checkpoint.names),)


def _state_dict(checkpoint: Checkpoint, _: str) -> Calls:
    """One call; tensors in the order of the model's own state dict, as a .bin checkpoint or a trainer has them."""
    if checkpoint.state_dict_order is None:
        raise CannotRun(
            f"{checkpoint.source} does not say its state-dict order; put state_dict.json (a list of all tensor names) "
            "beside config.json, or choose another delivery"
        )
    return (tuple(checkpoint.state_dict_order),)


def _per_tensor(checkpoint: Checkpoint, _: str) -> Calls:
    """One call per tensor, in sorted order, as RL weight updates send them."""
    return tuple((name,) for name in _sorted(checkpoint, "")[0])


def _per_file(checkpoint: Checkpoint, _: str) -> Calls:
    """One call per file; names sorted within each."""
    return tuple(tuple(sorted(t.name for t in checkpoint.tensors if t.file == f)) for f in checkpoint.files)


def _shuffled(checkpoint: Checkpoint, seed: str) -> Calls:
    """One call; the order drawn from the seed."""
    if not (seed.isascii() and seed.isdigit() and len(seed) < 20):
        raise CannotRun(f"shuffled needs a whole number as its seed, not {seed!r}; write for example shuffled:1")
    names = sorted(checkpoint.names)
    random.Random(int(seed)).shuffle(names)
    return (tuple(names),)


def _split(checkpoint: Checkpoint, name: str) -> Calls:
    """Two calls, sorted; the first ends with the named tensor."""
    names = _sorted(checkpoint, "")[0]
    if name not in names:
        raise CannotRun(f"{checkpoint.source} has no tensor {name!r} to split after; choose one that it has")
    at = names.index(name) + 1
    return tuple(part for part in (names[:at], names[at:]) if part)


def _runai(checkpoint: Checkpoint, _: str) -> Calls:
    """Whatever order vLLM's own Run:ai streamer delivers; known only when it has run."""
    return ()


ORDERS: dict[str, Callable[[Checkpoint, str], Calls]] = {
    "sorted": _sorted, "file": _file, "state-dict": _state_dict, "per-tensor": _per_tensor, "per-file": _per_file,
    "shuffled": _shuffled, "split": _split, "runai": _runai,
}
SENTENCES = {
    "sorted": "one call, sorted by name within each file", "file": "one call, in file order",
    "state-dict": "one call, in state-dict order", "per-tensor": "one call per tensor, sorted by name",
    "per-file": "one call per file, sorted by name", "shuffled": "one call, shuffled with seed {}",
    "split": "two calls, sorted, cut after {}", "runai": "through vLLM's own Run:ai streamer",
}


@dataclass(frozen=True)
class Delivery:
    """An order, its argument, and whether the producer reuses its buffer."""

    order: str  # a key of ORDERS
    argument: str = ""  # the seed of shuffled, the tensor of split
    reused_buffer: bool = False  # the producer overwrites its one staging buffer after each tensor

    @classmethod
    def parse(cls, text: str | Delivery) -> Delivery:
        """Read a delivery's name; raise CannotRun with the grammar when it is none."""
        if isinstance(text, Delivery):
            return text
        head, *options = [part.strip() for part in str(text).split(",")]
        order, colon, argument = head.partition(":")
        takes = order in ("shuffled", "split")
        if order not in ORDERS or options not in ([], ["reused-buffer"]) or not takes == bool(colon) == bool(argument):
            raise CannotRun(f"there is no delivery {text!r}; choose {GRAMMAR}")
        return cls(order, argument, bool(options))

    def calls(self, checkpoint: Checkpoint) -> Calls:
        """Return the tensor names of each outer `load_weights` call; empty when only the loader knows (runai)."""
        return ORDERS[self.order](checkpoint, self.argument)

    @property
    def sentence(self) -> str:
        """Say this delivery in words."""
        return SENTENCES[self.order].format(self.argument) + (", out of one reused buffer" if self.reused_buffer else "")

    def __str__(self) -> str:
        head = f"{self.order}:{self.argument}" if self.argument else self.order
        return head + (",reused-buffer" if self.reused_buffer else "")
