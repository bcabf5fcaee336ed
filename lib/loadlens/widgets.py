"""Sliders that select, and nothing more: each shows a figure that a plain call shows as well.

    widgets.stepper(run, "layers.0.self_attn.qkv_proj")     # figures.counters(run, [...], upto=n), n by slider
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import figures

if TYPE_CHECKING:
    from .run import Run

__all__ = ["stepper"]


def stepper(run: Run, layer: str) -> Any:
    """Return a slider through the arrivals of one layer; the figure follows it. Needs a live kernel."""
    import ipywidgets

    last = len(figures._layers(run, [layer])[0].arrivals)
    slider = ipywidgets.IntSlider(value=1, min=1, max=last, description="tensor")
    return ipywidgets.interactive(lambda n: figures.counters(run, [layer], upto=n), n=slider)
