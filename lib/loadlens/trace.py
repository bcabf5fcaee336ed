"""A run as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    write_trace(run, "load.json")
    ->  {"traceEvents": [{"ph": "X", "name": "OPTModel.load_weights", "ts": 3, "dur": 410, "pid": 1, "tid": 1}, …]}

One track for the calls of load_weights, one for deliveries (a slice from delivery to last reference), one per layer
that processes while loading, with its counter. A microsecond in the trace is a tick of the record: the order of
events and not the clock, so that two traces of one load are the same file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .run import Run

__all__ = ["trace_events", "write_trace"]

CALLS, DELIVERIES, LAYERS = 1, 2, 3  # one process each, so that tracks stay grouped


def _named(pid: int, name: str, tid: int | None = None) -> dict[str, Any]:
    what = "process_name" if tid is None else "thread_name"
    return dict(ph="M", name=what, pid=pid, tid=tid or 0, ts=0, args=dict(name=name))


def trace_events(run: Run) -> list[dict[str, Any]]:
    """Return the run's trace events, as the Trace Event Format has them."""
    record = run.record or {}
    end = record.get("ticks", 0) + 1
    events = [_named(CALLS, "load_weights calls"), _named(DELIVERIES, "delivered tensors"), _named(LAYERS, "layers")]
    for c in record.get("calls", ()):
        left = c["left"] if c["left"] >= 0 else end
        events.append(dict(ph="X", name=f"{c['cls']}.load_weights", cat="call", ts=c["entered"], dur=left - c["entered"], pid=CALLS, tid=1,
                           args=dict(module=c["module"], tensors=c["tensors"])))
    d = record.get("deliveries", {})
    for i, name in enumerate(d.get("name", ())):
        died = d["died"][i] if d["died"][i] >= 0 else end
        # asynchronous slices may overlap, and lifetimes do
        for ph, ts in (("b", d["born"][i]), ("e", max(died, d["born"][i] + 1))):
            events.append(dict(ph=ph, name=name, cat="delivery", id=i, ts=ts, pid=DELIVERIES, tid=1, args=dict(bytes=d["nbytes"][i], fate=d["fate"][i])))
    tracks: dict[str, int] = {}
    for t in run.timing:
        tid = tracks.setdefault(t.layer, len(tracks) + 1)
        if tid == len(tracks):
            events.append(_named(LAYERS, t.layer, tid))
        if t.first is not None:
            events.append(dict(ph="X", name=f"{t.cls}: waits for {t.total:,} elements", cat="layer", ts=t.first,
                               dur=max((t.trigger or end) - t.first, 1), pid=LAYERS, tid=tid, args=dict(state=t.state)))
        for tick, tensor, load_numel, counted, _ in t.arrivals:
            events.append(dict(ph="C", name=f"{t.layer} load_numel", ts=tick, pid=LAYERS, tid=tid, args=dict(load_numel=load_numel)))
            events.append(dict(ph="i", s="t", name=tensor if counted else f"{tensor} (not counted)", ts=tick, pid=LAYERS, tid=tid))
        if t.trigger is not None:
            events.append(dict(ph="i", s="t", name=f"trigger ({t.state}, by {t.by})", ts=t.trigger, pid=LAYERS, tid=tid,
                               args=dict(load_numel=t.load_numel, total=t.total)))
    return events


def write_trace(run: Run, file: str | Path) -> Path:
    """Write a run as a Chrome trace and return the file."""
    file = Path(file)
    file.write_text(json.dumps(dict(traceEvents=trace_events(run), displayTimeUnit="ns", otherData=dict(checkpoint=run.checkpoint.source,
                                    delivery=str(run.delivery), variant=str(run.variant), unit="one microsecond is one tick"))))
    return file
