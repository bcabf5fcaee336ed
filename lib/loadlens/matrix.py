"""Many runs as one table: a row for each delivery, say, and a column for each variant.

    matrix("recipe:glm-dsa-fp8", deliveries=["sorted", "file"], variants=["0.24.0", "0.32.0"])
    ->  a DataFrame with a row a run: delivery, variant, model_class, outcome, broken, lost, uncovered, why
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, open_checkpoint
from .errors import CannotRun
from .laws import UNRESOLVED
from .run import run
from .variant import resolve
from .workers import default_workers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["matrix"]


def matrix(checkpoint: str | Checkpoint, *, deliveries: Iterable[str] = ("sorted",), variants: Iterable[str] = ("installed",),
           model_classes: Iterable[str | None] = (None,), **options: Any) -> pd.DataFrame:
    """Run every combination and return a row each: delivery, variant, model_class, outcome, broken laws, lost, uncovered, why.

    A combination that can't be run (a class that a release lacks) is a row that is UNRESOLVED and says why.
    """
    import pandas as pd

    ck = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    rows, variants, pool = [], list(variants), options.get("workers") or default_workers()
    for i, variant in enumerate(variants):
        for near in variants[i : i + 2]:  # the next one imports vLLM while this one runs
            with contextlib.suppress(CannotRun):
                pool.start(resolve(near))
        for model_class in model_classes:
            for delivery in deliveries:
                row: dict[str, Any] = dict(delivery=delivery, variant=variant, model_class=model_class or "generic")
                try:
                    r = run(ck, delivery=delivery, variant=variant, model_class=model_class, **options)
                except CannotRun as e:
                    rows.append(row | dict(outcome=UNRESOLVED, broken="", lost=None, uncovered=None, why=str(e)))
                    continue
                broken = [law for law, v in r.laws.items() if v.outcome == "FAIL"]
                rows.append(row | dict(outcome=r.outcome, broken=" ".join(broken), lost=len(r.lost),
                                       uncovered=sum(u["elements"] for u in r.uncovered), why=r.why))
    return pd.DataFrame(rows)
