"""One figure a question; fixed colours with fixed meanings.

    figures.tape(checkpoint)      the file as a tape, one cell a tensor, coloured by dtype
    figures.calls(run)            the load_weights calls that one delivery turned into
    figures.lifetimes(run, …)     from delivery to last reference, tensor by tensor
    figures.coverage(run, …)      which elements of a parameter were written, layer by layer
    figures.load(run)             a whole load: which parameter was written when
    figures.matrix(frame, …)      many runs, one cell each
    figures.counters(run, …)      load_numel against its total, layer by layer
    figures.triggers(run)         first element, last element, trigger: a row a layer
    figures.memory({name: run})   bytes held while they wait for a layer

Every function returns a matplotlib Figure and draws nothing on its own. Blue is written, vermilion is lost or never
written, purple is stale, grey is merely delivered; each also differs in shape or hatch, so that grey print works.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .patterns import layer_of
from .timing import Arrival

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .checkpoint import Checkpoint
    from .run import Run

__all__ = ["COLOURS", "calls", "counters", "coverage", "lifetimes", "load", "matrix", "memory", "nouns", "tape", "triggers"]

# Okabe and Ito's colours; in grey they fall from light to dark in this order
COLOURS = dict(delivered="#b8c0c8", padding="#dfe3e8", trigger="#E69F00", stale="#CC79A7", finalize="#009E73",
               lost="#D55E00", written="#0072B2", ink="#222222")
OUTCOMES = dict(PASS=("#d7ecdf", "#14532d"), FAIL=("#f6cdbb", "#7f2704"), UNRESOLVED=("#eceae2", "#5c5640"))
_DTYPES = ["#56B4E9", "#999999", "#F0E442", "#009E73", "#CC79A7"]
_STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 11, "axes.titleweight": "bold",
          "axes.titlelocation": "left", "figure.dpi": 110, "savefig.dpi": 110, "hatch.linewidth": 0.6, "axes.titlepad": 10}


def _figure(width: float, height: float, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    import matplotlib.pyplot as plt

    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(rows, 1, figsize=(width, height), layout="constrained", squeeze=False, **options)
    plt.close(figure)  # shown by whoever returned it, once
    return figure, axes[:, 0]


def _bare(ax: Axes) -> None:
    ax.set_yticks([])
    ax.spines[["left"]].set_visible(False)


def nouns() -> Figure:
    """Draw the six nouns as one sentence: what goes in, what comes out."""
    figure, (ax,) = _figure(9.2, 2.3)
    boxes = [("Checkpoint", "names, shapes,\ndtypes, offsets"), ("Delivery", "order, calls,\nbuffers"), ("Variant", "which vLLM"),
             ("Run", "what happened"), ("Law", "what should\nhold"), ("Finding", "which tensor,\nwhere, why")]
    signs = ["×", "×", "→", "+", "→"]
    for i, (name, what) in enumerate(boxes):
        kind = "delivered" if i < 3 else "written" if i == 3 else "padding" if i == 4 else "lost"
        dark = i in (3, 5)
        ax.add_patch(_box(i * 1.6, 0, 1.2, 1, COLOURS[kind]))
        ax.text(i * 1.6 + 0.6, 0.68, name, ha="center", va="center", weight="bold", color="white" if dark else COLOURS["ink"])
        ax.text(i * 1.6 + 0.6, 0.3, what, ha="center", va="center", size=8.5, color="white" if dark else COLOURS["ink"])
        if i < len(signs):
            ax.text(i * 1.6 + 1.4, 0.5, signs[i], ha="center", va="center", size=15)
    ax.set(xlim=(-0.1, 9.3), ylim=(-0.1, 1.1))
    ax.axis("off")
    return figure


def _box(x: float, y: float, w: float, h: float, colour: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.02,rounding_size=0.08", facecolor=colour, edgecolor="none")


def tape(checkpoint: Checkpoint, *, pair: str = "indexer.wk.weight", cut: str = "lm_head.weight", width: float = 9.2) -> Figure:
    """Draw the tensors in file order, a cell each, coloured by dtype; arcs join every `pair` to its `_scale_inv`."""
    from matplotlib.patches import Rectangle

    figure, (ax,) = _figure(width, 2.6)
    names = [t.name for t in checkpoint.tensors]
    dtypes = list(dict.fromkeys(t.dtype for t in checkpoint.tensors))
    for i, t in enumerate(checkpoint.tensors):
        ax.add_patch(Rectangle((i + 0.5, 0), 0.9, 1, facecolor=_DTYPES[dtypes.index(t.dtype)], edgecolor="none"))
    for i, name in enumerate(names):
        if name.endswith(pair) and name + "_scale_inv" in names:
            a, b = names.index(name + "_scale_inv") + 0.95, i + 0.95
            ax.annotate("", (b, 1.02), (a, 1.02), arrowprops=dict(arrowstyle="-", color=COLOURS["lost"], lw=1.4,
                        connectionstyle=f"arc3,rad={-0.16 - 0.03 * (layer_of(name) or 0)}"))
            ax.text(b, 0.5, str(layer_of(name)), ha="center", va="center", size=7)
            ax.text(a, 0.5, str(layer_of(name)), ha="center", va="center", size=7)
    if cut in names:
        x = names.index(cut) + 0.95
        ax.annotate(cut, (x, 0), (x, -0.75), ha="center", arrowprops=dict(arrowstyle="->", color=COLOURS["ink"]), size=9)
    for i, dtype in enumerate(dtypes):
        ax.text(1 + i * 16, -0.75, f"■ {dtype}", color=_DTYPES[i], size=10, ha="left") if cut not in names else None
    handles = [Rectangle((0, 0), 1, 1, facecolor=_DTYPES[i]) for i in range(len(dtypes))]
    ax.legend(handles, [f"{d} ({sum(t.dtype == d for t in checkpoint.tensors)})" for d in dtypes], loc="upper center",
              bbox_to_anchor=(0.5, -0.18), ncols=len(dtypes), frameon=False, fontsize=9)
    ax.set(xlim=(0, len(names) + 1), ylim=(-1, 2.9), xlabel=f"position in the file, 1 to {len(names)}")
    _bare(ax)
    return figure


def calls(run: Run, *, width: float = 9.2, most: int = 14) -> Figure:
    """Draw which deliveries each call of load_weights consumed: the outer call above, those it made below."""
    frame = [c for c in run.record["calls"] if c["tensors"]]
    cut, frame = len(frame) - most, frame[:most]
    figure, (ax,) = _figure(width, 0.9 + 0.38 * len(frame))
    total = len(run.record["deliveries"]["name"])
    for y, c in enumerate(frame):
        outer = c["parent"] < 0
        ax.barh(y, c["last"] - c["first"] + 1, left=c["first"] + 0.5, height=0.62,
                color=COLOURS["delivered"] if outer else COLOURS["written"])
        label = f"{c['cls']}: {c['tensors']} tensor{'s' * (c['tensors'] != 1)}"
        inside = c["last"] - c["first"] > total * 0.35
        ax.text(c["first"] + 1 if inside else c["last"] + 2, y, label, va="center", size=8.5, color=COLOURS["ink"] if outer or not inside else "white")
    ax.set(xlim=(0, total + 1), ylim=(len(frame) - 0.4, -0.6), xlabel="delivered tensor, in order")
    if cut > 0:
        ax.text(total, len(frame) - 0.6, f"… and {cut} more calls", ha="right", size=8.5)
    _bare(ax)
    return figure


def lifetimes(run: Run, names: Iterable[str], *, width: float = 9.2) -> Figure:
    """Draw, for each tensor, the time from its delivery to its last reference; dotted lines are ends of inner calls."""
    d = run.record["deliveries"]
    names = list(names)
    born = np.array(d["born"])
    figure, (ax,) = _figure(width, 1.2 + 0.3 * len(names))
    total = len(born)
    for c in run.record["calls"]:
        if c["parent"] >= 0 and c["tensors"] and len(run.record["calls"]) < 20:
            x = int(np.searchsorted(born, c["left"], "right")) + 0.5
            ax.axvline(x, color=COLOURS["ink"], lw=0.9, ls=":")
            ax.text(x, -0.85, f"{c['cls']}\ncall ends", ha="right" if x > total / 2 else "left", va="bottom", size=8)
    for y, name in enumerate(names):
        for i in (k for k, n in enumerate(d["name"]) if n == name):
            end = total + 1 if d["died"][i] < 0 else int(np.searchsorted(born, d["died"][i], "right")) + 0.5
            fine = d["fate"][i] == "written"
            ax.plot([i + 0.5, end], [y, y], lw=5, solid_capstyle="butt", color=COLOURS["written" if fine else "lost"], alpha=0.9)
            ax.plot(i + 0.5, y, "o", ms=6, color=COLOURS["ink"])
            ax.plot(end, y, marker="o" if fine else "X", ms=7, color=COLOURS["written" if fine else "lost"], zorder=5)
    ax.set(xlim=(0, total * 1.02), ylim=(len(names) - 0.4, -1.6), xlabel="delivered tensors so far")
    ax.set_yticks(range(len(names)), [_short(n) for n in names], size=8.5)
    ax.tick_params(axis="y", length=0)
    return figure


def _short(name: str) -> str:
    parts = name.split(".")
    layer = layer_of(name)
    return f"layer {layer}  {'.'.join(parts[-3:])}" if layer is not None and len(parts) > 3 else name


_KINDS = (("written", "written from the checkpoint", ""), ("unwritten", "never written", "////"),
          ("constant", "a constant", "...."), ("padding", "padding", ""))


def coverage(run: Run, parameter: str, *, width: float = 9.2) -> Figure:
    """Draw the rows of every parameter whose name ends with `parameter`, a bar per layer, by what they hold."""
    from matplotlib.patches import Patch

    found = [p for p in run.record["parameters"] if p["name"].endswith(parameter)]
    figure, (ax,) = _figure(width, 1.3 + 0.34 * len(found))
    colour = dict(written=COLOURS["written"], unwritten=COLOURS["lost"], constant=COLOURS["trigger"], padding=COLOURS["padding"])
    seen = set()
    for y, p in enumerate(found):
        row = p["elements"] // p["shape"][0]
        for first, last, what, _ in p["spans"]:
            hatch = next(h for k, _, h in _KINDS if k == what)
            ax.barh(y, (last - first) / row, left=first / row, height=0.66, color=colour[what], hatch=hatch, edgecolor="white", lw=0.4)
            seen.add(what)
        note = f"{(p['written'] + p['padding']) // row} of {p['shape'][0]} rows"
        ax.text(p["shape"][0] * 1.01, y, note, va="center", size=8.5)
    ax.set_yticks(range(len(found)), [f"layer {layer_of(p['name'])}" if layer_of(p["name"]) is not None else p["name"] for p in found])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.set(xlabel=f"row of {parameter}", xlim=(0, max(p["shape"][0] for p in found)))
    handles = [Patch(facecolor=colour[k], hatch=h, edgecolor="white", label=label) for k, label, h in _KINDS if k in seen]
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize=9)
    return figure


def load(run: Run, *, width: float = 9.2, height: float = 3.4) -> Figure:
    """Draw every write of a load: the delivered tensor across, the parameter it went to down; crosses are lost tensors."""
    events = run.events
    events = events[events.kind.isin(["copy", "strided copy", "in place"])]
    order = {p["name"]: i for i, p in enumerate(run.record["parameters"])}
    figure, (ax,) = _figure(width, height)
    ax.plot(events.delivery + 1, [order.get(n, -1) for n in events.parameter], "s", ms=3, color=COLOURS["written"])
    fate = run.record["deliveries"]["fate"]
    lost = [i + 1 for i, f in enumerate(fate) if f in ("lost", "held", "orphaned")]
    ax.plot(lost, [-3] * len(lost), "X", ms=7, color=COLOURS["lost"], clip_on=False)
    if lost:
        ax.text(len(fate) / 2, -3, f"✕ lost: {len(lost)}", color=COLOURS["lost"], va="center", ha="center", size=9)
    ax.set(xlabel="delivered tensor, in order", ylabel="parameter, in module order", xlim=(0, len(fate) + 1), ylim=(len(order), -5))
    return figure


def matrix(frame: pd.DataFrame, *, rows: str, columns: str, width: float = 9.2) -> Figure:
    """Draw one cell per run: its outcome in colour and word, with the number of lost tensors."""
    down, across = list(dict.fromkeys(frame[rows])), list(dict.fromkeys(frame[columns]))
    figure, (ax,) = _figure(width, 0.8 + 0.42 * len(down))
    for _, r in frame.iterrows():
        y, x = down.index(r[rows]), across.index(r[columns])
        fill, ink = OUTCOMES[r["outcome"]]
        ax.add_patch(_box(x + 0.05, y + 0.1, 0.9, 0.8, fill))
        lost = r["lost"]
        word = {"PASS": "whole", "UNRESOLVED": "n/a"}.get(r["outcome"], f"{lost:.0f} lost" if lost and lost > 0 else f"breaks {r['broken']}")
        ax.text(x + 0.5, y + 0.5, word, ha="center", va="center", color=ink, size=9.5, weight="bold" if r["outcome"] == "FAIL" else "normal")
    ax.set(xlim=(0, len(across)), ylim=(len(down), 0))
    ax.set_xticks([i + 0.5 for i in range(len(across))], across)
    ax.set_yticks([i + 0.5 for i in range(len(down))], down)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure


def counters(run: Run, layers: Iterable[str] | None = None, *, upto: int | None = None, width: float = 9.2) -> Figure:
    """Draw each layer's counter against its total, a step a tensor; hollow marks were not counted.

    `layers` are names or ends of names; else the first layer of each kind. `upto` stops after that many arrivals.
    """
    found = _layers(run, layers)
    figure, axes = _figure(width, 2.1 * len(found), rows=len(found))
    for ax, t in zip(axes, found):
        # a tensor that raised never arrived: it stands at the end
        arrivals = t.arrivals + [Arrival(0, m, t.load_numel, False, 0) for m in t.missed if m not in [a.tensor for a in t.arrivals]]
        shown = arrivals[:upto]
        x = np.arange(1, len(shown) + 1)
        y = [a.load_numel for a in shown]
        ax.step([0, *x], [0, *y], where="post", color=COLOURS["written"], lw=1.8)
        for i, (tick, _, n, counted, _) in enumerate(shown):
            after = t.trigger is not None and (tick == 0 or tick > t.trigger)
            ax.plot(i + 1, n, "X" if after else "o", ms=9 if after else 7, mec=COLOURS["lost" if after else "written"],
                    color=COLOURS["lost"] if after else COLOURS["written"] if counted else "white", zorder=3)
        ax.axhline(t.total, color=COLOURS["ink"], lw=1, ls="--")
        ax.text(0.45, t.total, f"total {t.total:,}", va="bottom", ha="left", size=8.5)
        fired = sum(0 < a.tick < (t.trigger or 0) for a in arrivals)
        if t.trigger is not None and (upto is None or upto >= fired):
            late = t.by == "finalize"
            at = len(arrivals) + 1 if late else fired
            colour = COLOURS["lost"] if t.state == "early" else COLOURS["trigger"] if late else COLOURS["finalize"]
            ax.axvline(at, color=colour, lw=6, alpha=0.35)
            word = {"early": "processed, too early", "late": "processed by finalize, late"}.get(t.state, "processed")
            ax.text(at - 0.08, t.total * 0.06, word, rotation=90, ha="right", va="bottom", size=8.5, color=COLOURS["ink"])
        ax.set_title(f"{t.cls}  {t.layer}", fontsize=9.5, loc="left", weight="bold")
        ax.set(ylim=(0, t.total * 1.22), xlim=(0.4, len(arrivals) + 1.5), ylabel="load_numel")
        ax.set_xticks(range(1, len(arrivals) + 1), [".".join(a.tensor.split(".")[-2:]) for a in arrivals], size=8)
        ax.yaxis.set_major_formatter(lambda v, _, large=t.total > 5e5: f"{v / 1e6:.1f} M" if large else f"{v:,.0f}")
    return figure


def _layers(run: Run, layers: Iterable[str] | None) -> list[Any]:
    if layers is None:
        kinds: dict[str, Any] = {}
        for t in run.timing:
            kinds.setdefault(t.layer.rpartition(".")[2], t)
        return list(kinds.values())
    return [t for name in layers for t in run.timing if t.layer.endswith(name)]


def triggers(run: Run, *, width: float = 9.2) -> Figure:
    """Draw a row a layer: a bar from its first to its last element, and where it was processed."""
    born = np.array(run.record["deliveries"]["born"])
    found = run.timing
    figure, (ax,) = _figure(width, min(1.2 + 0.1 * len(found), 8))
    at = lambda tick: int(np.searchsorted(born, tick, "right"))  # noqa: E731
    end = len(born)
    marks = dict(early=("X", COLOURS["lost"]), late=("D", COLOURS["trigger"]), never=("_", COLOURS["lost"]))
    for y, t in enumerate(found):
        ax.plot([at(t.first), at(t.last)], [y, y], color=COLOURS["written"], lw=2.4 if len(found) < 100 else 1, solid_capstyle="butt")
        marker, colour = marks.get(t.state, ("o", COLOURS["finalize"]))
        x = end + end * 0.03 if t.by == "finalize" or t.trigger is None else at(t.trigger)
        ax.plot(x, y, marker, ms=5 if len(found) < 100 else 2, color=colour, mew=0, zorder=3)
    if any(t.by == "finalize" for t in found):
        ax.axvline(end + end * 0.015, color=COLOURS["ink"], lw=0.8, ls=":")
        ax.text(end + end * 0.03, -1.2, "finalize", ha="center", va="bottom", size=8.5)
    from matplotlib.lines import Line2D

    seen = dict.fromkeys(t.state for t in found)
    handles = [Line2D([], [], color=COLOURS["written"], lw=2.4, label="first to last element")]
    handles += [Line2D([], [], ls="", marker=marks.get(s, ("o", 0))[0], color=marks.get(s, ("", COLOURS["finalize"]))[1], label=f"processed {s}") for s in seen]
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize=9)
    ax.set(xlabel="delivered tensor, in order", ylabel="layer, in order", ylim=(len(found), -1.5), xlim=(0, end * 1.06))
    return figure


def memory(runs: dict[str, Run], *, width: float = 9.2, height: float = 2.8) -> Figure:
    """Draw, for each run, the bytes of earlier deliveries held at each delivery while they wait for their layer."""
    figure, (ax,) = _figure(width, height)
    styles = [(COLOURS["trigger"], "-"), (COLOURS["written"], "-"), (COLOURS["finalize"], "--"), (COLOURS["stale"], ":")]
    for (name, run), (colour, style) in zip(runs.items(), styles):
        held = np.array(run.held) / 1e6
        peak = run.held_peak()
        ax.plot(np.arange(1, len(held) + 1), held, color=colour, ls=style, lw=2, label=f"{name}: {peak['peak'] / 1e6:,.1f} MB, {peak['peak'] / peak['of']:.1%}")
    ax.axhline(peak["of"] / 1e6, color=COLOURS["ink"], lw=0.8, ls="--")
    ax.text(1, peak["of"] / 1e6, "all that goes to these layers", va="bottom", size=8.5)
    ax.legend(frameon=False, fontsize=9, loc="center left")
    ax.set(xlabel="delivered tensor, in order", ylabel="MB held", ylim=(-3, peak["of"] / 1e6 * 1.15))
    return figure
