"""What tracing and a cold start cost, as ratios measured in one run.

    $ make bench
    what                                                  ratio   goal     measured
    a further experiment on a warm variant / a cold one   0.04    <= 0.10  0.83 s / 19.2 s
    traced load / plain load, recipe:opt-125m             1.22    <= 1.50  142 ms / 116 ms (medians of 7, in turn)

Seconds depend on the machine; ratios taken in turn in one run hold better. Exit status 1 when a goal is missed.
"""

from __future__ import annotations

import statistics
import sys
import time

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


def main() -> int:
    """Measure everything, print a table, return 1 when a goal is missed."""
    print(f"{'what':<55}{'ratio':<8}{'goal':<10}measured")
    missed = 0
    with Workers() as workers:
        for measure in (_warm_against_cold, _traced_against_plain):
            what, ratio, goal, note = measure(workers)
            missed += ratio > goal
            print(f"{what:<55}{ratio:<8.2f}{f'<= {goal:.2f}':<10}{note}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
