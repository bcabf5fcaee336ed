"""Many runs as one table: a row for each delivery, say, and a column for each variant.

    matrix("recipe:glm-dsa-fp8", deliveries=["sorted", "file"], variants=["0.24.0", "0.32.0"])
    ->  a DataFrame with a row a run: delivery, variant, model_class, outcome, broken, lost, uncovered, why
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint, open_checkpoint
from .errors import CannotRun
from .laws import FAIL, UNRESOLVED
from .run import run

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["matrix"]

LANES = 2


def matrix(checkpoint: str | Checkpoint, *, deliveries: Iterable[str] = ("sorted",), variants: Iterable[str] = ("installed",),
           model_classes: Iterable[str | None] = (None,), **options: Any) -> pd.DataFrame:
    """Run every combination and return a row each: delivery, variant, model_class, outcome, broken laws, lost, uncovered, why.

    A combination that can't be run (a class that a release lacks) is a row that is UNRESOLVED and says why.
    """
    import pandas as pd

    ck = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)

    def of(variant: str) -> list[dict[str, Any]]:
        return [_row(ck, delivery, variant, model_class, options) for model_class in model_classes for delivery in deliveries]

    deliveries, model_classes = list(deliveries), list(model_classes)
    # a variant has its own process, and needs it alone: two of them keep two cores busy
    with ThreadPoolExecutor(LANES) as lanes:
        return pd.DataFrame([row for rows in lanes.map(of, dict.fromkeys(variants)) for row in rows])


def _row(ck: Checkpoint, delivery: str, variant: str, model_class: str | None, options: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = dict(delivery=delivery, variant=variant, model_class=model_class or "generic")
    try:
        r = run(ck, delivery=delivery, variant=variant, model_class=model_class, **options)
    except CannotRun as e:
        return row | dict(outcome=UNRESOLVED, broken="", lost=None, uncovered=None, why=str(e))
    broken = [law for law, v in r.laws.items() if v.outcome == FAIL]
    return row | dict(outcome=r.outcome, broken=" ".join(broken), lost=len(r.lost),
                      uncovered=sum(u["elements"] for u in r.uncovered), why=r.why)
