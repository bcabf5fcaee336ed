"""What tracing and a cold start cost, as ratios measured in one run.

    $ make bench
    what                                                  ratio   goal     measured
    a further experiment on a warm variant / a cold one   0.04    <= 0.10  0.83 s / 19.2 s
    traced load / plain load, recipe:opt-125m             1.22    <= 1.50  142 ms / 116 ms (medians of 7, in turn)

Seconds depend on the machine; ratios taken in turn in one run hold better. Exit status 1 when a goal is missed.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from . import figures
from .checkpoint import Checkpoint, open_checkpoint
from .recipes import RECIPES, opt_tensors, write_recipe
from .run import run
from .workers import Workers

__all__ = ["main"]

PAIRS = 7


def _warm_against_cold(workers: Workers) -> tuple[str, float, float, str]:
    start = time.perf_counter()
    run("recipe:glm-dsa-fp8", delivery="file", warm=False, compare=False, workers=workers)
    cold = time.perf_counter() - start
    run("recipe:glm-dsa-fp8", delivery="file", compare=False, workers=workers)
    times = []
    for _ in range(PAIRS):
        start = time.perf_counter()
        run("recipe:glm-dsa-fp8", delivery="file", compare=False, workers=workers)
        times.append(time.perf_counter() - start)
    warm = statistics.median(times)
    return "a further experiment on a warm variant / a cold one", warm / cold, 0.10, f"{warm:.2f} s / {cold:.1f} s"


def _traced_against_plain(workers: Workers) -> tuple[str, float, float, str]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for i in range(PAIRS + 1):
        for watch in (False, True):
            result = run("recipe:opt-125m", watch=watch, compare=False, workers=workers)
            if i:  # the first pair fills the page cache
                seconds[watch].append(result.record["seconds"]["load"])
    plain, traced = statistics.median(seconds[False]), statistics.median(seconds[True])
    ratio = statistics.median(t / p for t, p in zip(seconds[True], seconds[False]))
    return "traced load / plain load, recipe:opt-125m", ratio, 1.5, f"{traced * 1e3:.0f} ms / {plain * 1e3:.0f} ms (medians of {PAIRS}, in turn)"


def _deep(layers: int, folder: Path) -> Checkpoint:
    """An OPT of many narrow layers, to see what grows with their number."""
    config = RECIPES["opt-tiny"].config | dict(num_hidden_layers=layers, hidden_size=64, word_embed_proj_dim=64, ffn_dim=64, num_attention_heads=1)
    folder.mkdir()
    write_recipe(dataclasses.replace(RECIPES["opt-tiny"], config=config, tensors=opt_tensors(config)), folder)
    return open_checkpoint(folder)


def _many_layers(workers: Workers) -> Iterator[tuple[str, float, float, str]]:
    cost, drawing = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for layers in (10, 1000):
            ck = _deep(layers, Path(folder) / str(layers))
            load, seen, draw = [], [], []
            for _ in range(9 if layers < 100 else 3):
                start = time.perf_counter()
                result = run(ck, delivery="sorted", quantization="fp8_per_channel", compare=False, workers=workers)
                start = time.perf_counter()
                steps, text = len(result.record["steps"]), str(result)
                seen.append((time.perf_counter() - start) / steps)
                load.append((result.record["seconds"]["load"] + result.record["seconds"]["report"]) / steps)
                start = time.perf_counter()
                for figure in (figures.triggers(result), figures.counters(result)):
                    figure.canvas.draw()
                draw.append(time.perf_counter() - start)
                assert text
            cost[layers] = statistics.median(load) + statistics.median(seen)
            drawing[layers] = statistics.median(draw)
    yield ("cost per counter event, 1,000 layers / 10 layers", cost[1000] / cost[10], 1.2,
           f"{cost[1000] * 1e6:.0f} us / {cost[10] * 1e6:.0f} us, recorded and reported")
    yield ("drawing per layer, 1,000 layers / 10 layers", drawing[1000] / 1000 / (drawing[10] / 10), 1.2,
           f"{drawing[1000]:.1f} s / {drawing[10]:.1f} s, both figures")


def main() -> int:
    """Measure everything, print a table, return 1 when a goal is missed."""
    print(f"{'what':<55}{'ratio':<8}{'goal':<10}measured")
    missed = 0
    with Workers() as workers:
        measured = itertools.chain((measure(workers) for measure in (_warm_against_cold, _traced_against_plain)), _many_layers(workers))
        for what, ratio, goal, note in measured:
            missed += ratio > goal
            print(f"{what:<55}{ratio:<8.2f}{f'<= {goal:.2f}':<10}{note}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
