"""Run one checkpoint, delivered one way, to one vLLM; the host's half.

    >>> run("recipe:glm-dsa-fp8", delivery="file", model_class="nvidia")
    FAIL  recipe:glm-dsa-fp8 · file · vLLM 0.32.0 · nvidia · cpu
      L1 FAIL        3 of 53 parameters differ from one sorted load: …
      …

vLLM never runs in this process. Every variant has one warm worker that has imported it; every experiment is a child
that the worker forks. A child that crashes, hangs or is killed becomes a Run whose laws are UNRESOLVED.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from . import show
from .checkpoint import Checkpoint, open_checkpoint
from .delivery import Delivery
from .errors import CannotRun
from .exchange import SCHEMA, read_record
from .laws import FAIL, PASS, UNRESOLVED, Finding, Verdict, judge
from .timing import LayerTiming, held, timing
from .variant import Variant, resolve
from .workers import Worker, Workers, default_workers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "by_hand", "generate", "run"]

POISON, OTHER_POISON = 0xFF, 0x7B  # NaN in every float format; and another, so that two loads can't agree by luck
TIMEOUT = 300.0  # seconds for one experiment


class Run:
    """What happened when a checkpoint was delivered; its repr is the report."""

    def __init__(self, checkpoint: Checkpoint, delivery: Delivery, variant: Variant, request: dict[str, Any],
                 record: dict[str, Any] | None, events: dict[str, np.ndarray], failure: str | None, log: str,
                 seconds: float, reference: Run | None = None) -> None:
        self.checkpoint, self.delivery, self.variant, self.request = checkpoint, delivery, variant, request
        self.record, self.failure, self.log, self.seconds, self.reference = record, failure, log, seconds, reference
        self._events = events

    @functools.cached_property
    def laws(self) -> dict[str, Verdict]:
        """The verdict on each law."""
        return judge(self.record, self.reference.record if self.reference else None, self.failure)

    @property
    def outcome(self) -> str:
        """FAIL when a law is broken; UNRESOLVED when coverage or loss could not be judged; else PASS."""
        outcomes = {law: v.outcome for law, v in self.laws.items()}
        if FAIL in outcomes.values():
            return FAIL
        return UNRESOLVED if UNRESOLVED in (outcomes["L2"], outcomes["L3"]) else PASS

    @property
    def why(self) -> str:
        """The sentence of the law that decided the outcome; empty when all laws hold."""
        if self.outcome == PASS:
            return ""
        deciding = self.laws if self.outcome == FAIL else ("L2", "L3")
        return next(self.laws[law].sentence for law in deciding if self.laws[law].outcome == self.outcome)

    @property
    def exit_code(self) -> int:
        """0 all laws hold as far as the run shows, 1 a law is broken, 2 it could not run."""
        return {PASS: 0, FAIL: 1, UNRESOLVED: 2}[self.outcome]

    @property
    def error(self) -> dict[str, Any] | None:
        """The exception that ended the load: {type, message, where, traceback}; None when it finished."""
        return self.record["error"] if self.record else None

    @property
    def findings(self) -> pd.DataFrame:
        """Every finding, a row each: law, tensor, parameter, elements, of, when, why."""
        import pandas as pd

        columns = list(Finding.__dataclass_fields__)
        return pd.DataFrame([vars(f) for v in self.laws.values() for f in v.findings], columns=columns)

    @property
    def lost(self) -> list[str]:
        """Names of the delivered tensors that reached nothing, in the order they came."""
        return [f.tensor for f in self.laws["L3"].findings if f.tensor]

    @property
    def uncovered(self) -> list[dict[str, Any]]:
        """Parameters with elements that did not come from the checkpoint: {parameter, elements, of}."""
        return [dict(parameter=f.parameter, elements=f.elements, of=f.of) for f in self.laws["L2"].findings]

    @property
    def deliveries(self) -> pd.DataFrame:
        """One row a delivered tensor: name, call, bytes, when it came and was let go (ticks), and its fate."""
        import pandas as pd

        return pd.DataFrame(self.record["deliveries"] if self.record else {})

    @property
    def calls(self) -> pd.DataFrame:
        """One row a call of load_weights, outer and inner: id, parent, module, cls, tensors, entered, left."""
        import pandas as pd

        return pd.DataFrame(self.record["calls"] if self.record else [])

    @property
    def coverage(self) -> pd.DataFrame:
        """One row a parameter: elements written from the checkpoint, constant, padding, unwritten, written twice."""
        import pandas as pd

        columns = ["name", "shape", "dtype", "elements", "written", "constant", "padding", "unwritten", "twice", "poisoned"]
        return pd.DataFrame(self.record["parameters"] if self.record else [], columns=columns)

    def sources(self, parameter: str) -> pd.DataFrame:
        """Say which tensor each stretch of a parameter's elements came from: rows, elements, what, tensors."""
        import pandas as pd

        p = next((p for p in (self.record or {}).get("parameters", ()) if parameter in (p["name"], *p["aliases"])), None)
        if p is None:
            raise CannotRun(f"the model has no parameter {parameter!r}; `run.coverage` lists them")
        row, names = max(p["elements"] // max(p["shape"][0], 1), 1), self.record["deliveries"]["name"]
        return pd.DataFrame([dict(rows=f"{a // row}..{-(-b // row) - 1}", elements=b - a, what=what, tensors=", ".join(names[i] for i in ids))
                             for a, b, what, ids in p["spans"]])

    @property
    def events(self) -> pd.DataFrame:
        """One row a write into a parameter or buffer; columns as in inside/record.py, names for indices."""
        import pandas as pd

        frame = pd.DataFrame(self._events)
        if self.record and len(frame):
            slots, names = np.array(self.record["slots"], object), np.array([*self.record["deliveries"]["name"], None], object)
            kinds = np.array(self.record["event_kinds"], object)
            frame = frame.assign(parameter=slots[frame.parameter], source=names[frame.source], kind=kinds[frame.kind])
        return frame

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain values: what `loadlens check --json` prints."""
        record = self.record or {}
        return dict(
            schema=SCHEMA, checkpoint=self.checkpoint.source, identity=self.checkpoint.identity(),
            delivery=str(self.delivery), variant=str(self.variant),
            model_class=self.request["model_class"], quantization=self.request["quantization"], kernel=self.request["kernel"],
            device=self.request["device"], rounds=self.request["rounds"], outcome=self.outcome,
            laws={law: dict(outcome=v.outcome, sentence=v.sentence) for law, v in self.laws.items()},
            lost=self.lost, uncovered=self.uncovered, calls=record.get("calls", []), triggers=self._triggers(),
            tensors=len(record.get("deliveries", {}).get("name", ())), stale_reads=len(record.get("stale", ())),
            peak_bytes=record.get("peak_bytes"), total_bytes=record.get("total_bytes"), held=self.held_peak() if record.get("deliveries") else None,
            error=self.error and {k: self.error[k] for k in ("type", "message", "where")},
            environment=record.get("environment"), seconds=round(self.seconds, 3),
        )

    @functools.cached_property
    def timing(self) -> list[LayerTiming]:
        """When each layer that processes while loading did so, and what it missed."""
        return timing(self.record, self.reference.record if self.reference else None) if self.record else []

    @functools.cached_property
    def held(self) -> list[int]:
        """For each delivery, the bytes of earlier deliveries that wait for a layer; see `timing.held`."""
        return held(self.record, self.timing) if self.record and self.record["deliveries"] else []

    def held_peak(self) -> dict[str, int]:
        """Return {peak, of}: the most that was held, and what all tensors weigh that wait for a layer, in bytes."""
        waiting = {a.tensor for t in self.timing for a in t.arrivals}
        d = self.record["deliveries"]
        return dict(peak=max(self.held, default=0), of=sum(n for name, n in zip(d["name"], d["nbytes"]) if not waiting or name in waiting))

    def _triggers(self) -> list[dict[str, Any]]:
        return [dict(layer=t.layer, cls=t.cls, round=t.round, state=t.state, at=t.at, by=t.by, load_numel=t.load_numel, total=t.total,
                     missed=t.missed, missing=t.missing, counts=[(a.tensor, a.load_numel, a.counted) for a in t.arrivals]) for t in self.timing]

    def __repr__(self) -> str:
        return show.text(self)

    def _repr_html_(self) -> str:
        return show.html(self)


def run(checkpoint: str | Path | Checkpoint, *, delivery: str | Delivery = "sorted", variant: str | Variant | None = None,
        model_class: str | None = None, quantization: str | None = None, kernel: str | None = None, device: str = "cpu",
        rounds: int = 1, timeout: float = TIMEOUT, compare: bool = True, watch: bool = True, warm: bool = True,
        workers: Workers | None = None) -> Run:
    """Deliver a checkpoint to a vLLM and return what happened.

    `checkpoint` is a folder or recipe:NAME; `delivery`, `variant` as in `loadlens check --help`. `device` is cpu, meta
    or cuda. `rounds` > 1 loads the same weights again through vLLM's layerwise reload. `compare` also runs the sorted
    load that L1 is judged against (once per variant and checkpoint). `watch=False` records nothing: for timing.
    Raises CannotRun for bad input; whatever the load itself does, even a crash, is in the Run.
    """
    ck = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    how = Delivery.parse(delivery)
    which = variant if isinstance(variant, Variant) else resolve(variant)
    if kernel is not None and quantization is None:
        raise CannotRun("a kernel is chosen for online quantization; add quantization, as in --quantization fp8 --kernel marlin")
    if kernel is None and device == "cpu" and quantization in ("fp8", "fp8_per_tensor"):
        raise CannotRun(f"vLLM has no per-tensor FP8 on a CPU; add --kernel marlin (with stand-ins) to --quantization {quantization}, or use fp8_per_channel")
    if kernel not in (None, "marlin"):
        raise CannotRun(f"there is no kernel {kernel!r}; choose marlin, or leave it to vLLM")
    if device not in ("cpu", "meta", "cuda"):
        raise CannotRun(f"there is no device {device!r}; choose cpu, meta or cuda")
    if device == "cuda" and not _has_cuda():
        raise CannotRun("there is no CUDA device here; use --device cpu, or meta")
    if how.order == "runai" and device == "meta":
        raise CannotRun("the delivery runai reads real bytes, and meta has none; use file, which is close to the order it streams in")
    if how.order == "runai" and importlib.util.find_spec("runai_model_streamer") is None:
        raise CannotRun("the delivery runai needs the package runai-model-streamer; `make env` installs it")
    pool = workers or default_workers()
    request = _request(ck, which, model_class=model_class, quantization=quantization, kernel=kernel, device=device,
                       rounds=rounds, watch=watch)
    worker = pool.get(which) if warm else None
    reference = None
    if compare:
        written = tuple((ck.path / file).stat().st_mtime_ns for file in ck.files)  # the identity knows no values
        key = (ck.identity(), written, str(ck.path), model_class, quantization, kernel, device)
        known = worker.references if worker else {}
        reference = known.get(key)
        if reference is None:
            reference = _experiment(pool, worker, ck, Delivery("sorted"), which, request | dict(rounds=1, poison=OTHER_POISON), timeout)
            if reference.record is not None:  # one that was stopped or killed may do better next time
                known[key] = reference
            worker = pool.get(which) if warm else None  # the sorted load may have ended it
    return _experiment(pool, worker, ck, how, which, request | dict(poison=POISON), timeout, reference)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def by_hand(checkpoint: str | Path | Checkpoint, lines: str, *, variant: str | Variant | None = None, model_class: str | None = None,
            quantization: str | None = None, kernel: str | None = None, timeout: float = TIMEOUT,
            workers: Workers | None = None) -> None:
    """Run your own lines inside vLLM, on a model that is built and poisoned but not loaded, and print what they print.

    The lines see `model`, `tensors` (the checkpoint's, by name), `config` and `torch`. An exception in them is printed.
    """
    ck = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    which = variant if isinstance(variant, Variant) else resolve(variant)
    pool = workers or default_workers()
    request = _request(ck, which, model_class=model_class, quantization=quantization, kernel=kernel) | dict(poison=POISON, script=textwrap.dedent(lines))
    done = _experiment(pool, pool.get(which), ck, Delivery("sorted"), which, request, timeout)
    if done.record is None:
        raise CannotRun(done.failure)
    print(done.record.get("printed", done.error and done.error["traceback"]), end="")


def generate(checkpoint: str | Path | Checkpoint, prompts: list[list[int]], *, delivery: str | Delivery = "sorted",
             variant: str | Variant | None = None, quantization: str | None = None, kernel: str | None = None, max_tokens: int = 16,
             timeout: float = TIMEOUT, workers: Workers | None = None) -> pd.DataFrame:
    """Load by a delivery in vLLM's own engine, and answer prompts (token ids) greedily.

    Returns a row a prompt: prompt, tokens, logprobs and prompt_logprobs (nats; None where not finite). Raises CannotRun when
    the load raises or the engine can't run here.
    """
    import pandas as pd

    ck = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    how, which = Delivery.parse(delivery), variant if isinstance(variant, Variant) else resolve(variant)
    if how.order == "runai":
        raise CannotRun("the delivery runai can be checked, and not generated from yet; use file, which is close to the order it streams in")
    pool = workers or default_workers()
    request = _request(ck, which, model_class=None, quantization=quantization, kernel=kernel)
    request |= dict(poison=POISON, prompts=prompts, max_tokens=max_tokens, max_model_len=max(map(len, prompts)) + max_tokens + 1)
    done = _experiment(pool, pool.get(which), ck, how, which, request, timeout)
    if done.record is None or done.error:
        why = done.failure or f"{done.error['type']}: {done.error['message'] or done.error['traceback'].strip().splitlines()[-1]}"
        raise CannotRun(f"{ck.source} could not answer on vLLM {which}: {why}")
    return pd.DataFrame(done.record["answers"])


def _request(ck: Checkpoint, variant: Variant, *, model_class: str | None, quantization: str | None, kernel: str | None = None,
             device: str = "cpu", rounds: int = 1, watch: bool = True) -> dict[str, Any]:
    return dict(
        schema=SCHEMA, source=ck.source, checkpoint=str(ck.path), architecture=ck.architecture, model_class=model_class,
        quantization=quantization, kernel=kernel, device=device, rounds=rounds, watch=watch, notes=list(variant.notes), compiled=variant.compiled,
        largest=max((t.nbytes for t in ck.tensors), default=0),
        tensors={t.name: [t.dtype, list(t.shape), t.file] for t in ck.tensors},
    )


def _experiment(pool: Workers, worker: Worker | None, ck: Checkpoint, how: Delivery, which: Variant,
                request: dict[str, Any], timeout: float, reference: Run | None = None) -> Run:
    start = time.perf_counter()
    out = Path(tempfile.mkdtemp(prefix="run-", dir=pool.folder()))
    request = request | dict(out=str(out), delivery=dict(order=how.order, reused_buffer=how.reused_buffer, calls=how.calls(ck)))
    one = worker
    if worker is None or worker.threads > 1:  # forking a process with threads can hang: start a fresh one instead
        one = pool.cold(which)
    try:
        failure = one.run(request, timeout)
        record = read_record(out)
        events = load_file(out / "events.safetensors") if record and (out / "events.safetensors").exists() else {}
        log = (out / "log.txt").read_text(errors="replace") if (out / "log.txt").exists() else ""
    finally:
        if one is not worker:
            one.close()
        shutil.rmtree(out, ignore_errors=True)
    if record is None:
        failure = failure or "it ended without a record"
        record_failure = f"the {'lines could not be run' if 'script' in request else 'load could not be judged'}: {failure}"
    else:
        record_failure = None
        error = record["error"]
        if error and error.get("cannot_build"):
            raise CannotRun(error["message"])
    return Run(ck, how, which, request, record, events, record_failure, log, time.perf_counter() - start, reference)
