"""How a Run reads, as text and as HTML.

    FAIL  recipe:glm-dsa-fp8 · file · vLLM 0.32.0 · nvidia · cpu
          one call, in file order: 85 tensors in 1 outer call of load_weights, which made 2 inner calls
      L1  FAIL        3 of 53 parameters differ from one sorted load: …
      …
    lost tensors (6 of 85)
      model.layers.{0..2}.self_attn.indexer.wk.weight             x3
    elements not written from the checkpoint
      model.layers.{0..2}.self_attn.indexer.wk_weights_proj.weight  32,768 of 33,792 each, never written  x3
"""

from __future__ import annotations

import html as markup
from typing import TYPE_CHECKING

from .laws import FAIL, LAWS, PASS, UNRESOLVED
from .patterns import collapse

if TYPE_CHECKING:
    from .run import Run

__all__ = ["html", "text", "title"]

MOST = 8  # lines of one list before it is cut


def title(run: Run) -> str:
    """Name a run in one line, without its outcome."""
    r = run.request
    parts = [run.checkpoint.source, str(run.delivery), f"vLLM {run.variant}"]
    parts += [r["model_class"] or "", r["quantization"] or "", r.get("kernel") or "", r["device"], f"{r['rounds']} rounds" if r["rounds"] > 1 else ""]
    return " · ".join(p for p in parts if p)


def _delivered(run: Run) -> str:
    record = run.record or {}
    calls = record.get("calls", [])
    outer = sum(c["parent"] < 0 for c in calls)
    tensors = len(record.get("deliveries", {}).get("name", ()))
    return (f"{run.delivery.sentence}: {tensors:,} tensors in {_count(outer, 'outer call')} of load_weights, "
            f"which made {_count(len(calls) - outer, 'inner call')}")


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def _lists(run: Run) -> list[tuple[str, list[str]]]:
    """The findings as (heading, lines), layers collapsed."""
    out = []
    if run.lost:
        of = len(run.record["deliveries"]["name"])
        whys: dict[str, list[str]] = {}
        for f in run.laws["L3"].findings:
            whys.setdefault(f.why, []).append(f.tensor)
        lines = [f"{name}{_times(n)}: {why}" for why, names in whys.items() for name, n in collapse(names)]
        out.append((f"lost tensors ({len(run.lost)} of {of})", lines))
    groups: dict[tuple, list[str]] = {}
    for f in run.laws["L2"].findings:
        groups.setdefault((f.elements, f.of, f.why), []).append(f.parameter)
    if groups:
        lines = [f"{name}{_times(n)}: {elements:,} of {of:,}{' each' if n > 1 else ''}, {why}"
                 for (elements, of, why), names in groups.items() for name, n in collapse(names)]
        out.append(("elements not written from the checkpoint", lines))
    changed: dict[str, list[str]] = {}
    for f in run.laws["L5"].findings:
        if f.parameter:
            changed.setdefault(f.why, []).append(f.parameter)
    if changed:
        lines = [f"{name}{_times(n)}: {why}" for why, names in changed.items() for name, n in collapse(names)]
        out.append(("parameters that a second round changed", lines))
    groups4: dict[tuple, list[str]] = {}
    for f, t in zip(run.laws["L4"].findings, [t for t in run.timing if t.state != "on time"]):
        groups4.setdefault((t.state, f.elements, f.of, f.why), []).append(f.parameter)
    if groups4:
        lines = [f"{name}{_times(n)}: {state}, {why}" for (state, _, _, why), names in groups4.items() for name, n in collapse(names)]
        out.append(("layers not processed on time", lines))
    if run.error:
        out.append(("raised", [f"{w['file']}:{w['line']} in {w['function']}" for w in run.error["where"][-3:]] + [run.error["type"]]))
    if run.timing and not run.error:
        held = run.held_peak()
        out.append(("tensors held beyond their own delivery", [
            f"{held['peak'] / 1e6:,.1f} MB at the peak, of {held['of'] / 1e6:,.1f} MB that go to layers processed while loading "
            f"({held['peak'] / max(held['of'], 1):.1%})"]))
    if run.record and run.record.get("stale"):
        d = run.record["deliveries"]["name"]
        names = dict.fromkeys(d[s["delivery"]] for s in run.record["stale"])
        out.append((f"read after the producer had overwritten them ({len(names)} tensors)", [f"{n}{_times(k)}" for n, k in collapse(names)]))
    if run.record and run.record["environment"]["notes"]:
        out.append(("conditions", run.record["environment"]["notes"]))
    return [(head, lines if len(lines) <= MOST else [*lines[:MOST], f"… and {len(lines) - MOST} more"]) for head, lines in out]


def _times(n: int) -> str:
    return f" (x{n})" if n > 1 else ""


def text(run: Run) -> str:
    """Return the report of a run as plain text."""
    lines = [f"{run.outcome}  {title(run)}", f"      {_delivered(run)}" if run.record else f"      {run.failure}"]
    for law, v in run.laws.items():
        lines.append(f"  {law}  {v.outcome:<10}  {v.sentence}")
    for head, items in _lists(run):
        lines += ["", head, *(f"  {item}" for item in items)]
    return "\n".join(lines)


_COLOURS = {PASS: "#1b7837", FAIL: "#b2182b", UNRESOLVED: "#7a6a2f"}


def html(run: Run) -> str:
    """Return the report of a run as an HTML fragment, with the laws' full text as tooltips."""
    e = markup.escape

    def badge(outcome: str) -> str:
        return f'<b style="color:{_COLOURS[outcome]}">{outcome}</b>'

    rows = "".join(
        f'<tr><td title="{e(LAWS[law])}" style="text-align:left"><b>{law}</b></td><td style="text-align:left">{badge(v.outcome)}</td>'
        f'<td style="text-align:left">{e(v.sentence)}</td></tr>' for law, v in run.laws.items()
    )
    lists = "".join(
        f'<p style="margin:.6em 0 0"><b>{e(head)}</b></p><ul style="margin:0">{"".join(f"<li><code>{e(i)}</code></li>" for i in items)}</ul>'
        for head, items in _lists(run)
    )
    what = _delivered(run) if run.record else run.failure or ""
    return (f'<div class="loadlens-run"><p style="margin:0">{badge(run.outcome)} &nbsp;{e(title(run))}<br><small>{e(what)}</small></p>'
            f"<table>{rows}</table>{lists}</div>")
