"""Which layer was processed when: before its last element, after it, or as soon as it could be.

    timing(record)[0]  ->  LayerTiming(layer="…layers.0.self_attn.qkv_proj", state="early", at="…q_proj.weight",
                                       load_numel=1769472, total=1769472, by="load", missed=["…q_proj.bias"], missing=768)

A layer should process with the delivery of its last element. `early`: it processed, and elements came after.
`late`: all its elements had come, and it still waited for finalize. `never`, `repeated`: what they say. A layer whose
checkpoint simply has fewer elements than its parameters (padding) can only wait for finalize: that is `on time`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Arrival", "LayerTiming", "held", "owners", "timing"]


class Arrival(NamedTuple):
    """A tensor that was loaded into a layer, or that a layer dropped."""

    tick: int
    tensor: str
    # the layer's counter after it
    load_numel: int
    # did the counter move?
    counted: bool
    elements: int


@dataclass
class LayerTiming:
    """One layer in one round of loading; ticks as in the record."""

    layer: str
    cls: str
    round: int
    # on time, early, late, never or repeated
    state: str = "on time"
    # the delivered tensor that fired the trigger; None when finalize did
    at: str | None = None
    by: str | None = None
    # the counter when the layer was processed
    load_numel: int = 0
    total: int = 0
    # ticks; None when it did not happen
    first: int | None = None
    last: int | None = None
    trigger: int | None = None
    # tensors whose elements were not in when the layer was processed, or never counted; and how many elements
    missed: list[str] = field(default_factory=list)
    missing: int = 0
    # every arrival, in order
    arrivals: list[Arrival] = field(default_factory=list)


def owners(record: dict[str, Any] | None) -> dict[str, str]:
    """Return, for each delivered tensor, the module whose parameter it went to."""
    out: dict[str, str] = {}
    names = (record or {}).get("deliveries", {}).get("name", ())
    for p in (record or {}).get("parameters", ()):
        for _, _, what, ids in p["spans"]:
            out |= {names[i]: p["name"].rpartition(".")[0] for i in ids if what == "written"}
    return out


def held(record: dict[str, Any], layers: list[LayerTiming]) -> list[int]:
    """Return, for each delivery, the bytes of earlier deliveries still held then, of tensors that wait for a layer.

    Only tensors that go to layers which process while loading count; every tensor when there is no such layer.
    """
    d = record["deliveries"]
    waiting = {a.tensor for t in layers for a in t.arrivals}
    mine = [i for i, name in enumerate(d["name"]) if not waiting or name in waiting]
    changes = [(d["born"][i], 1, d["nbytes"][i]) for i in mine] + [(d["died"][i], 1, -d["nbytes"][i]) for i in mine if d["died"][i] >= 0]
    changes += [(tick, 0, 0) for tick in d["born"]]  # sampled before its own bytes are added, after what died by then
    out, now = [], 0
    for _, kind, nbytes in sorted(changes):
        now += nbytes
        if not kind:
            out.append(now)
    return out


def timing(record: dict[str, Any], reference: dict[str, Any] | None = None) -> list[LayerTiming]:
    """Return every layer that vLLM counted or processed while loading, in order of first appearance.

    `reference` (one sorted load) says which layer a tensor belongs to when loading it raised.
    """
    names = record.get("deliveries", {}).get("name", [])
    layers: dict[tuple[int, str], LayerTiming] = {}
    for s in record.get("steps", ()):
        t = layers.setdefault((s["round"], s["layer"]), LayerTiming(s["layer"], s["cls"], s["round"]))
        if s["what"] in ("counted", "uncounted", "after"):
            _arrived(t, s, names[s["delivery"]])
        elif s["what"] == "trigger":
            if t.trigger is not None:
                t.state = "repeated"
                continue
            t.trigger, t.by, t.load_numel, t.total = s["tick"], s["by"], s["load_numel"] or 0, s["total"] or 0
            t.at = names[s["delivery"]] if s["by"] == "load" else None
    error = record.get("error")
    if error and record["stage"] == "load" and names:
        t = layers.get((record["deliveries"]["round"][-1], owners(reference).get(names[-1], "")))
        if t is not None and t.trigger is not None and t.at != names[-1]:  # it raised because the layer had been processed
            t.missed, t.missing = [names[-1]], record["deliveries"]["elements"][-1]
            t.state = "early"
    out = [t for t in layers.values() if t.arrivals or t.trigger is not None and t.by == "load"]
    for t in out:
        _judge(t, finished=not error)
    return out


def _arrived(t: LayerTiming, s: dict[str, Any], tensor: str) -> None:
    counted = s["what"] == "counted" and s.get("elements", 0) > 0
    t.arrivals.append(Arrival(s["tick"], tensor, s["load_numel"] or 0, counted, s.get("elements") or 0))
    t.first = s["tick"] if t.first is None else t.first
    t.last = s["tick"]
    t.total = s["total"] or t.total
    t.load_numel = s["load_numel"] or t.load_numel
    if not counted or t.trigger is not None:
        t.missed.append(tensor)
        t.missing += s.get("elements") or 0


def _judge(t: LayerTiming, finished: bool) -> None:
    if t.state in ("early", "repeated"):
        return
    if t.trigger is None:
        t.state = "never" if finished else "on time"  # a load that raised says nothing of layers still counting
    elif t.last is not None and t.last > t.trigger:
        t.state = "early"
        after = [a for a in t.arrivals if a.tick > t.trigger]
        t.missed, t.missing = [a.tensor for a in after], sum(a.elements for a in after)
    elif t.by == "finalize" and t.missed:
        t.state = "late"
    else:
        t.missed, t.missing = [], 0
