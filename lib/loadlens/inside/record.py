"""Watch a model being loaded: deliveries, calls, writes, lifetimes, and what every element ends up holding.

    recorder = Recorder(model, device="cpu")
    with recorder.watching():
        model.load_weights(recorder.deliver(weights))
    recorder.report()["lost"]   ->  ["model.layers.0.self_attn.indexer.wk.weight", ...]

One `TorchDispatchMode` sees every operation between the first delivery and the last; `memory.py` says what each
byte holds. A tensor is delivered as a fresh alias that carries a lease, and so does every view of it: when the
last of them is dropped, the consumer has let go of that tensor's memory.

What it cannot see: writes that bypass torch's dispatcher (numpy, memmove, other threads). Those are caught
afterwards, on real devices, because parameters start out poisoned.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from .memory import CONSTANT, Memory, byte_range

if TYPE_CHECKING:
    from .layerwise import Layerwise

__all__ = ["EVENT_COLUMNS", "EVENT_KINDS", "Recorder", "padding_rows", "poison", "poison_model"]

# one row per write into a parameter or buffer; times in ns, everything else counts or indices
EVENT_COLUMNS = ("tick", "ns", "call", "delivery", "source", "parameter", "offset", "elements", "kind", "stale")
EVENT_KINDS = ("copy", "constant", "in place", "partial", "placeholder", "replaced", "strided copy", "orphan")
K_COPY, K_CONSTANT, K_INPLACE, K_PARTIAL, K_PLACEHOLDER, K_REPLACED, K_STRIDED, K_ORPHAN = range(8)
WIDTH = len(EVENT_COLUMNS)

VIEW, WRITE, PURE, EMPTY = range(4)
COPY = torch.ops.aten.copy_.default
ITEM = torch.ops.aten._local_scalar_dense.default
CAT = torch.ops.aten.cat.default
# overwrite their first argument without reading it; every other in-place operation reads it too
OVERWRITES = ("copy_", "fill_", "zero_", "uniform_", "normal_", "random_", "bernoulli_", "exponential_", "set_",
              "static_scaled_fp8_quant", "dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant")
# write an extent that depends on values, which the dispatcher does not show
PARTIAL = ("index_put", "index_copy", "index_fill", "index_add", "scatter", "masked", "put_")
# keep each element's place
ELEMENTWISE = ("clone", "_to_copy", "neg", "mul", "div")

# attention's own scales: most checkpoints have none, and vLLM's defaults then stand
OPTIONAL = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")

_storage_id = torch._C._storage_id


class _Lease:
    """What every view of one delivered tensor shares; its end is the end of the consumer's hold on the memory."""

    __slots__ = ("delivery", "node", "recorder")

    def __init__(self, delivery: int, node: int, recorder: Recorder) -> None:
        self.delivery, self.node, self.recorder = delivery, node, recorder

    def __del__(self) -> None:
        self.recorder._released(self.delivery)


class _Tap:
    """Pass an iterator on, item by item, without holding the item: lifetimes stay the consumer's own."""

    def __init__(self, items: Iterable, each: Any) -> None:
        self.items, self.each = iter(items), each

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        return self.each(next(self.items))


class _Slot:
    """A parameter or buffer that stood under a name at some time: one name, one storage, one byte range."""

    __slots__ = ("index", "name", "storage", "start", "end", "itemsize", "numel", "device", "aliases", "late")


class _Op:
    """What an operator does to memory, read off its schema once."""

    __slots__ = ("kind", "written", "overwrites", "partial", "elementwise")

    def __init__(self, func: Any) -> None:
        schema, name = func._schema, func.overloadpacket.__name__
        self.written = [
            a.name if a.kwarg_only else i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        ]
        self.overwrites = name in OVERWRITES or any(isinstance(w, str) for w in self.written)
        self.partial = any(p in name for p in PARTIAL)
        self.elementwise = name.rstrip("_") in ELEMENTWISE or torch.Tag.pointwise in func.tags
        if self.written:
            self.kind = WRITE
        elif name == "_unsafe_view" or any(r.alias_info is not None for r in schema.returns):
            self.kind = VIEW
        else:
            self.kind = EMPTY if "empty" in name else PURE


class _Watch(TorchDispatchMode):
    """The mode: hands every operation to the recorder's memory. Nothing else lives here."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.memory, self.ops = recorder, recorder.memory, recorder.ops

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        op = self.ops.get(func)
        if op is None:
            op = self.ops[func] = _Op(func)
        if op.kind == VIEW:
            out = func(*args, **kwargs) if kwargs else func(*args)
            lease = getattr(args[0], "_lease", None)
            if lease is not None:
                for t in (out,) if isinstance(out, torch.Tensor) else out:
                    t._lease = lease
            return out
        if func is COPY and isinstance(args[1], torch.Tensor):
            node = self._read(args[1], func)
            out = func(*args, **kwargs) if kwargs else func(*args)
            self.recorder._write(args[0], node, K_COPY, args[1])
            return out
        kwargs = kwargs or {}
        if op.kind == EMPTY:
            out = func(*args, **kwargs)
            self.recorder._empty(out)
            return out
        inputs = list(_tensors(args)) + list(_tensors(kwargs.values()))
        written = [args[w] if isinstance(w, int) else kwargs.get(w) for w in op.written if isinstance(w, str) or w < len(args)]
        written = list(_tensors(written))
        node, sources = None, []
        for t in inputs:
            if not (op.overwrites and any(t is w for w in written)):
                n = self._read(t, func)
                if n is not None:
                    node = self.memory.join(node, n)
                    sources.append(t)
        if func is ITEM and node is not None:
            self.recorder.escaped.add(node)
        out = func(*args, **kwargs)
        if op.kind == WRITE:
            if func.overloadpacket.__name__ == "_foreach_copy_":
                for dst, src in zip(args[0], args[1]):
                    self.recorder._write(dst, self.memory.node(src), K_COPY, src)
                return out
            for t in written:
                kind = K_PARTIAL if op.partial else K_CONSTANT if node is None else K_INPLACE
                self.recorder._write(t, node, kind, sources[0] if op.elementwise and len(sources) == 1 else None)
        elif node is not None:
            for t in _tensors(out if isinstance(out, (list, tuple)) else (out,)):
                self._made(t, node, func, op, args, sources)
        return out

    def _made(self, t: torch.Tensor, node: int, func: Any, op: _Op, args: tuple, sources: list[torch.Tensor]) -> None:
        """Say what a fresh result holds, place by place where that is known."""
        memory = self.memory
        split = [s for s in sources if memory.is_split(s)]
        memory.set_all(t, node)
        if op.elementwise and len(split) == 1:
            others = None
            for s in sources:
                if s is not split[0]:
                    others = memory.join(others, memory.node(s))
            memory.move(t, split[0], others)
        elif func is CAT and (len(args) < 2 or args[1] == 0) and t.is_contiguous():
            at = 0
            with torch._C._DisableTorchDispatch():
                for part in args[0]:
                    if part.dim() == t.dim():
                        to = t.narrow(0, at, part.shape[0])
                        at += part.shape[0]
                        if not memory.move(to, part):
                            memory.write(to, memory.node(part))

    def _read(self, t: torch.Tensor, func: Any) -> int | None:
        """Return what `t` holds now, noting a delivered tensor whose memory holds something else by now."""
        node = self.memory.node(t)
        lease = getattr(t, "_lease", None)
        if lease is not None and node != lease.node:
            self.recorder._stale(lease.delivery, node, func)
        return node


def _tensors(values: Iterable) -> Iterator[torch.Tensor]:
    for v in values:
        if isinstance(v, torch.Tensor):
            yield v
        elif isinstance(v, (list, tuple)):
            yield from _tensors(v)


def poison(t: torch.Tensor, byte: int) -> None:
    """Fill `t` with one byte everywhere: NaN for 0xFF in every float format, and never a value by accident."""
    if t.is_meta or t.dtype is torch.bool or not t.numel():
        return
    with torch.no_grad():
        flat = t.detach()
        if flat.is_contiguous():
            flat.view(-1).view(torch.uint8).fill_(byte)
        else:
            flat.copy_(torch.full((flat.numel() * flat.element_size(),), byte, dtype=torch.uint8, device=t.device)
                       .view(t.dtype).view(t.shape))


def poison_model(model: torch.nn.Module, byte: int) -> None:
    """Poison every parameter that a checkpoint must write."""
    for name, p in model.named_parameters():
        if not name.endswith(OPTIONAL):
            poison(p, byte)


def _still_poison(t: torch.Tensor, byte: int) -> int:
    """Count the elements of `t` whose every byte is still the poison."""
    if t.is_meta or t.dtype is torch.bool or not t.numel():
        return 0
    wide = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    pattern = int.from_bytes(bytes([byte]) * t.element_size(), "little", signed=True)
    return int((t.detach().contiguous().view(wide) == pattern).sum())


def padding_rows(model: torch.nn.Module) -> dict[int, tuple[int, int]]:
    """Return, by storage, the rows of vocabulary embeddings that vLLM declares as padding (no checkpoint has them)."""
    rows = {}
    for m in model.modules():
        shard, weight = getattr(m, "shard_indices", None), getattr(m, "weight", None)
        if shard is not None and isinstance(weight, torch.Tensor):
            first, last = shard.num_org_elements, shard.num_org_elements_padded
            if first < last <= weight.shape[0]:
                rows[_storage_id(weight)] = (first, last)
    return rows


class Recorder:
    """Record one model's loading; use `watching()` around it, `deliver()` for its weights, `report()` at the end."""

    def __init__(self, model: torch.nn.Module, *, device: str, poison_byte: int = 0xFF, watch: bool = True,
                 layerwise: Layerwise | None = None) -> None:
        self.model, self.device, self.byte, self.watch = model, device, poison_byte, watch
        self.memory = Memory()
        self.ops: dict[Any, _Op] = {}
        self.tick = 0  # counts deliveries, call boundaries and writes: the time axis of the figures
        self.round = 0
        self.started = time.perf_counter_ns()
        # deliveries, one list per column
        self.names: list[str] = []
        self.nbytes: list[int] = []
        self.numel: list[int] = []
        self.rounds: list[int] = []
        self.outer: list[int] = []
        self.inner: list[int] = []
        self.born: list[int] = []
        self.died: list[int] = []
        self.died_in: list[int] = []
        self.alive: list[int] = []  # bytes of delivered tensors alive right after each delivery
        self.skipped: dict[int, str] = {}
        self._live = 0
        self._producers: set[int] = set()  # storages that deliveries came in
        # calls of load_weights, outermost first met
        self.calls: list[dict[str, Any]] = []
        self.stack: list[int] = []
        # writes
        self.events = array("q")
        self.stale_reads: list[dict[str, Any]] = []
        self.escaped: set[int] = set()
        self.slots: list[_Slot] = []
        self.by_storage: dict[int, list[_Slot]] = {}
        self.current: dict[str, _Slot] = {}
        self._module_names: dict[int, str] = {}
        self._padding = padding_rows(model)
        self._undo: list[Any] = []
        self.layerwise = layerwise
        self._attach()
        if layerwise is not None:
            layerwise.attach(self)

    # ------------------------------------------------------------------ names and slots

    def _attach(self) -> None:
        for name, m in self.model.named_modules(remove_duplicate=False):
            self._module_names[id(m)] = name
        self.rescan(first=True)
        for name, p in self.model.named_parameters():  # buffers hold what the constructor computed: constants
            if name.endswith(OPTIONAL):
                continue
            slot = self.by_storage[_storage_id(p)][0]
            self.memory.whole[slot.storage] = self.memory.unwritten(slot.name)

    def module_name(self, m: torch.nn.Module) -> str:
        """Return the dotted name of one of the model's modules; "" for the model itself or a stranger."""
        return self._module_names.get(id(m), "")

    @property
    def alive_bytes(self) -> int:
        """Bytes of delivered tensors that the consumer still holds."""
        return self._live

    def rescan(self, first: bool = False) -> None:
        """Pick up parameters that changed without a registration: `.data =`, late tying, `_parameters[...] =`."""
        for name, m in self.model.named_modules(remove_duplicate=False):
            for attribute, t in [*m._parameters.items(), *m._buffers.items()]:
                if t is not None:
                    self._register(f"{name}.{attribute}" if name else attribute, t, first)

    def _registered(self, m: torch.nn.Module, attribute: str, t: torch.Tensor | None) -> None:
        name = self._module_names.get(id(m))
        if name is not None and t is not None:
            self._register(f"{name}.{attribute}" if name else attribute, t)

    def _register(self, name: str, t: torch.Tensor, first: bool = False) -> None:
        if isinstance(t, torch.nn.parameter.UninitializedTensorMixin):
            return
        storage, (start, end) = self.memory.pin(t), byte_range(t)
        old = self.current.get(name)
        if old is not None and old.storage == storage and old.start == start and old.end == end:
            return
        for slot in self.by_storage.get(storage, ()):
            if slot.start == start and slot.numel == t.numel():  # tied weights are one slot with two names
                if name != slot.name and name not in slot.aliases:
                    slot.aliases.append(name)
                self.current[name] = slot
                return
        slot = _Slot()
        slot.index, slot.name, slot.storage, slot.start, slot.end = len(self.slots), name, storage, start, end
        slot.itemsize, slot.numel, slot.device, slot.aliases = t.element_size(), t.numel(), t.device.type, []
        # made or replaced by processing, not by a loader: what it holds beside the checkpoint is processing's own
        slot.late = not first and (not self.stack or self.layerwise is not None and self.layerwise.processing)
        self.slots.append(slot)
        self.by_storage.setdefault(storage, []).append(slot)
        self.current[name] = slot
        if not first:
            node = self.memory.node(t)
            self._event(-1 if node is None else node, slot, slot.start, slot.numel, K_REPLACED, -1)

    # ------------------------------------------------------------------ deliveries and calls

    def deliver(self, weights: Iterable[tuple]) -> Iterator[tuple]:
        """Wrap the weights given to the outermost `load_weights`: each tensor becomes one delivery.

        The producer's own work (reading, dequantizing, cloning) is not recorded.
        """
        items = iter(weights)

        def pull() -> Iterator[tuple]:
            while True:
                with torch._C._DisableTorchDispatch():
                    item = next(items, None)
                if item is None:
                    return
                yield item
                del item

        return _Tap(pull(), self._deliver)

    def _deliver(self, item: tuple) -> tuple:
        index = len(self.names)
        name, t = item[0], item[1]
        node = self.memory.delivery(index)
        with torch._C._DisableTorchDispatch():
            alias = t.detach()  # a fresh object, so that only the consumer can hold it
        self.tick += 1
        self.names.append(name)
        self.nbytes.append(t.nbytes)
        self.numel.append(t.numel())
        self.rounds.append(self.round)
        self.outer.append(self.stack[0] if self.stack else -1)
        self.inner.append(self.stack[-1] if self.stack else -1)
        self.born.append(self.tick)
        self.died.append(-1)
        self.died_in.append(-1)
        self._live += t.nbytes
        self.alive.append(self._live)
        self.memory.write(alias, node)
        self._producers.add(_storage_id(alias))
        alias._lease = _Lease(index, node, self)
        return (name, alias, *item[2:])

    def _released(self, delivery: int) -> None:
        self.died[delivery] = self.tick
        self.died_in[delivery] = self.stack[-1] if self.stack else -1
        self._live -= self.nbytes[delivery]

    def _wrap_call(self, name: str, m: torch.nn.Module, outermost: bool) -> None:
        inner = m.load_weights

        def load_weights(weights: Iterable[tuple], *args: Any, **kwargs: Any) -> Any:
            if outermost and self.stack:  # a model that calls its own load_weights again is not a new delivery
                return inner(weights, *args, **kwargs)
            self.tick += 1
            call = dict(id=len(self.calls), parent=self.stack[-1] if self.stack else -1, round=self.round,
                        module=name, cls=type(m).__name__, entered=self.tick, left=-1, tensors=0, first=-1, last=-1)
            self.calls.append(call)
            self.stack.append(call["id"])

            def passing(item: tuple) -> tuple:
                at = len(self.names) - 1
                call["tensors"] += 1
                call["first"] = at if call["first"] < 0 else call["first"]
                call["last"] = at
                self.inner[at] = call["id"]
                return item

            try:
                return inner(_Tap(self.deliver(weights) if outermost else weights, passing), *args, **kwargs)
            finally:
                self.tick += 1
                call["left"] = self.tick
                self.stack.pop()

        m.load_weights = load_weights
        self._undo.append(lambda: m.__dict__.pop("load_weights", None))

    # ------------------------------------------------------------------ watching

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch everything until the block ends, then let go of the model again."""
        for name, m in self.model.named_modules():
            if callable(getattr(m, "load_weights", None)):
                self._wrap_call(name, m, outermost=m is self.model)
        self._watch_skips()
        hooks = [nn_module.register_module_parameter_registration_hook(self._registered),
                 nn_module.register_module_buffer_registration_hook(self._registered)]
        self.started = time.perf_counter_ns()
        try:
            with _Watch(self) if self.watch else contextlib.nullcontext():
                yield
        finally:
            for h in hooks:
                h.remove()
            while self._undo:
                self._undo.pop()()
            self.rescan()
            gc.collect()

    def _watch_skips(self) -> None:
        """Note the tensors that vLLM's own AutoWeightsLoader declares it will not load, if the model can use it at all."""
        utils = sys.modules.get("vllm.model_executor.models.utils")
        if utils is None:
            return
        AutoWeightsLoader = utils.AutoWeightsLoader
        for method in ("_can_skip", "_can_ignore_unexpected"):
            original = getattr(AutoWeightsLoader, method, None)
            if original is None:
                continue

            def asked(loader: Any, qualname: str, _original: Any = original, _method: str = method) -> bool:
                answer = _original(loader, qualname)
                if answer and self.names:
                    self.skipped[len(self.names) - 1] = f"AutoWeightsLoader.{_method}({qualname!r})"
                return answer

            setattr(AutoWeightsLoader, method, asked)
            self._undo.append(lambda m=method, o=original: setattr(AutoWeightsLoader, m, o))

    # ------------------------------------------------------------------ writes

    def _event(self, source: int, slot: _Slot, offset: int, elements: int, kind: int, stale: int) -> None:
        self.tick += 1
        call = self.stack[-1] if self.stack else -1
        self.events.extend((self.tick, time.perf_counter_ns() - self.started, call, len(self.names) - 1, source,
                            slot.index, (offset - slot.start) // slot.itemsize, elements, kind, stale))

    def _write(self, dst: torch.Tensor, node: int | None, kind: int, src: torch.Tensor | None) -> None:
        memory = self.memory
        storage = _storage_id(dst)
        if kind == K_PARTIAL:
            memory.imprecise.add(storage)
            node = memory.join(node, memory.node(dst))
        if kind == K_COPY and node is None:
            kind = K_CONSTANT
        elif kind == K_COPY and not dst.is_contiguous():
            kind = K_STRIDED
        if not (src is not None and memory.is_split(src) and memory.move(dst, src)):
            memory.write(dst, node)
        slots = self.by_storage.get(storage)
        if slots:
            start, end = byte_range(dst)
            lease = getattr(src, "_lease", None)
            stale = lease.delivery if lease is not None and lease.node != node else -1
            if dst.is_meta and self.device != "meta":
                kind = K_PLACEHOLDER
            for slot in slots:
                if slot.start < end and slot.end > start:
                    if kind != K_PLACEHOLDER and self.current.get(slot.name) is not slot:
                        kind = K_ORPHAN  # the model has another tensor under this name by now
                    self._event(CONSTANT if node is None else node, slot, start, dst.numel(), kind, stale)
                    if self.layerwise is not None and self.layerwise.by_name and kind != K_CONSTANT:
                        self.layerwise.wrote(slot.name, dst.numel())

    def _empty(self, out: Any) -> None:
        """Fresh memory that nobody has written; poisoned, so that a forgotten element can't pass for a value."""
        for t in _tensors((out,)):
            self.memory.set_all(t, self.memory.unwritten("uninitialized memory"))
            with torch._C._DisableTorchDispatch():
                poison(t, self.byte)

    def _stale(self, delivery: int, node: int | None, func: Any) -> None:
        now = sorted(i for i in self.memory.leaves(node) if i >= 0) if node is not None else []
        self.stale_reads.append(dict(delivery=delivery, holds=now[:4], op=str(func), tick=self.tick,
                                     call=self.stack[-1] if self.stack else -1))

    # ------------------------------------------------------------------ the report

    def report(self) -> dict[str, Any]:
        """Return the record of what happened, as plain values; see `exchange.py` for the fields."""
        memory, device = self.memory, self.device
        parameters, in_final, named = [], set(), set()
        for name, t in self.model.named_parameters(remove_duplicate=False):
            slot = self.current.get(name)
            if slot is None or slot.index in named:
                continue
            named.add(slot.index)
            parameters.append(self._parameter(slot, t))
        for slot in self.current.values():
            for a, b, node in memory.pieces.get(slot.storage, ()) or self._whole(slot):
                if a < slot.end and b > slot.start:
                    in_final |= memory.leaves(node)
        written = set()
        rows = self.event_rows()
        for source in np.unique(rows[~np.isin(rows[:, 8], (K_PLACEHOLDER, K_ORPHAN)) & (rows[:, 4] > 0), 4]) if len(rows) else ():
            written |= memory.leaves(int(source))
        orphaned = set()
        for source in np.unique(rows[(rows[:, 8] == K_ORPHAN) & (rows[:, 4] > 0), 4]) if len(rows) else ():
            orphaned |= memory.leaves(int(source))
        fates = self._fates(in_final, written, orphaned)
        doubles = self._doubles(rows)
        for p in parameters:
            p["twice"] = doubles.get(p.pop("slot"), 0)
        total = sum(self.nbytes)
        return dict(
            deliveries=dict(name=self.names, round=self.rounds, outer=self.outer, call=self.inner, nbytes=self.nbytes,
                            elements=self.numel, born=self.born, died=self.died, died_in=self.died_in, alive=self.alive, fate=fates),
            skipped={str(i): why for i, why in self.skipped.items()},
            calls=self.calls, parameters=parameters, stale=self.stale_reads,
            steps=self.layerwise.steps if self.layerwise is not None else [],
            slots=[s.name for s in self.slots], ticks=self.tick, events=len(rows),
            peak_bytes=max(self.alive, default=0), total_bytes=total, held_bytes=self._live,
            poison=self.byte if device != "meta" else None,
        )

    def _whole(self, slot: _Slot) -> list[tuple[int, int, int]]:
        node = self.memory.whole.get(slot.storage)
        return [] if node is None else [(slot.start, slot.end, node)]

    def _parameter(self, slot: _Slot, t: torch.Tensor) -> dict[str, Any]:
        memory = self.memory
        counts = dict(written=0, constant=0, padding=0, unwritten=0)
        spans: list[list[Any]] = []
        pad = self._padding.get(slot.storage)
        row = t.numel() // t.shape[0] if t.dim() and t.shape[0] else 1
        pad_range = (pad[0] * row, pad[1] * row) if pad else (0, 0)
        pieces = memory.content(t) if t.is_contiguous() else [(0, t.numel(), memory.leaves(memory.node(t) or CONSTANT))]
        for first, last, leaves in pieces:
            sources = sorted(i for i in leaves if i >= 0)
            if any(i < -1 for i in leaves):
                what = "unwritten"
            elif sources:
                what = "written"
            elif pad_range[0] <= first and last <= pad_range[1]:
                what = "padding"
            else:
                what = "constant"
            counts[what] += last - first
            spans.append([first, last, what, sources[:8]])
        return dict(name=slot.name, aliases=slot.aliases, shape=list(t.shape), dtype=str(t.dtype).removeprefix("torch."),
                    elements=t.numel(), **counts, spans=spans, slot=slot.index, late=slot.late, imprecise=slot.storage in memory.imprecise,
                    poisoned=_still_poison(t, self.byte) if not t.is_meta else None)

    def _fates(self, in_final: set[int], written: set[int], orphaned: set[int]) -> list[str]:
        memory = self.memory
        escaped: set[int] = set()
        for node in self.escaped:
            escaped |= memory.leaves(node)
        late = {s["delivery"] for s in self.stale_reads}  # used, but after the producer had overwritten it
        missing = [i for i in range(len(self.names)) if i not in in_final and i not in written]
        held: set[int] = set()
        if missing:
            for storage, node in memory.whole.items():
                # in the producer's own storage a delivery's lease decides
                if storage not in self.by_storage and storage not in self._producers and not memory.expired(storage):
                    held |= memory.leaves(node)
        fate = []
        for i in range(len(self.names)):
            if i in in_final:
                fate.append("written")
            elif i in written:
                fate.append("overwritten")
            elif i in orphaned:
                fate.append("orphaned")
            elif i in late:
                fate.append("stale")
            elif i in self.skipped:
                fate.append("skipped")
            elif i in escaped:
                fate.append("scalar")
            elif self.died[i] < 0 or i in held:
                fate.append("held")
            else:
                fate.append("lost")
        return fate

    def _doubles(self, rows: np.ndarray) -> dict[int, int]:
        """Count, by slot, the elements that more than one whole-range copy from the checkpoint wrote in one round."""
        out: dict[int, int] = {}
        copies = rows[(rows[:, 8] == K_COPY) & (rows[:, 4] > CONSTANT)]
        rounds = np.array([*self.rounds, 0])[copies[:, 3]]  # a write before the first delivery is of round 0
        for index, number in np.unique(np.stack([copies[:, 5], rounds]), axis=1).T:
            mine = copies[(copies[:, 5] == index) & (rounds == number)]
            if len(mine) < 2:
                continue
            at = np.concatenate([mine[:, 6], mine[:, 6] + mine[:, 7]])
            step = np.concatenate([np.ones(len(mine), np.int64), -np.ones(len(mine), np.int64)])
            order = np.lexsort((step, at))
            depth, width = np.cumsum(step[order])[:-1], np.diff(at[order])
            twice = int(width[depth >= 2].sum())
            if twice:
                out[int(index)] = max(twice, out.get(int(index), 0))
        return out

    def event_rows(self) -> np.ndarray:
        """Return the write events, [events, columns] int64, in order; columns as in EVENT_COLUMNS."""
        return np.frombuffer(self.events, dtype=np.int64).reshape(-1, WIDTH) if self.events else np.zeros((0, WIDTH), np.int64)

    def event_columns(self) -> dict[str, np.ndarray]:
        """Return the write events by column; `source` becomes the delivery it came from, -1 for none or several."""
        rows = self.event_rows()
        columns = {name: rows[:, i].copy() for i, name in enumerate(EVENT_COLUMNS)}
        single = {}
        for node in np.unique(columns["source"]):
            leaves = [i for i in self.memory.leaves(int(node)) if i >= 0] if node > 0 else []
            single[int(node)] = leaves[0] if len(leaves) == 1 else -1
        columns["source"] = np.array([single[int(n)] for n in columns["source"]], np.int64)
        return columns
