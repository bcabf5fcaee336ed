"""One experiment, start to record: build a model, deliver a checkpoint to it, write down what happened.

    run_experiment(request)     # writes record.json and events.safetensors into request["out"]

Runs in a process of its own (see worker.py). Whatever vLLM raises is part of the record.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import save_file

from ..exchange import SCHEMA, write_json
from .build import CannotBuild, build_model
from .deliver import Tensors, deliver_round
from .layerwise import Layerwise
from .record import EVENT_KINDS, Recorder, poison_model

__all__ = ["layout_digests", "run_experiment", "tensor_digests"]


def tensor_digests(model: torch.nn.Module) -> dict[str, str]:
    """Return SHA-256 by parameter name: keys and digests as in vLLM 0.32.0's weight_checksum.py."""
    return {
        name: hashlib.sha256(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, p in model.named_parameters()
        if not p.is_meta
    }


def layout_digests(report: dict[str, Any]) -> dict[str, str]:
    """Return, by parameter, a digest of which tensor each element came from; it needs no values."""
    names = report["deliveries"]["name"]
    out = {}
    for p in report["parameters"]:
        spans = [(a, b, what, sorted({names[i] for i in ids})) for a, b, what, ids in p["spans"]]
        out[p["name"]] = hashlib.sha256(repr(spans).encode()).hexdigest()
    return out


def run_experiment(request: dict[str, Any]) -> None:
    """Run one request and write its record; never raises for what the model or vLLM does."""
    out = Path(request["out"])
    record: dict[str, Any] = dict(
        schema=SCHEMA, stage="build", error=None, environment=_environment(request), model={}, digests={}, layout={},
        deliveries={}, calls=[], parameters=[], skipped={}, stale=[], steps=[], warnings=[], seconds={},
    )
    seconds, recorder = record["seconds"], None
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            if request.get("prompts"):
                from .generate import generate

                record["stage"] = "load"
                with _timed(seconds, "generate"):
                    record["answers"] = generate(request)
                record["stage"] = "done"
                write_json(out / "record.json", record)
                return
            layerwise = Layerwise()  # loaders are wrapped while the model is built
            with _timed(seconds, "build"):
                model, config, notes = build_model(request)
            record["environment"]["notes"] += notes
            record["environment"]["load_only"] = any(n.startswith("load-only") for n in notes)
            elements = sum(p.numel() for p in model.parameters())
            record["model"] = dict(cls=type(model).__name__, module=type(model).__module__, elements=elements,
                                   parameters=sum(1 for _ in model.parameters()),
                                   bytes=sum(p.nbytes for p in model.parameters()))
            poison_model(model, request["poison"])
            # vLLM's loaders run under the default dtype of the model; so does this
            torch.set_default_dtype(config.model_config.dtype)
            if "script" in request:
                record["printed"] = _by_hand(model, config, request)
                record["stage"] = "done"
                write_json(out / "record.json", record)
                return
            recorder = Recorder(model, device=request["device"], poison_byte=request["poison"], watch=request["watch"],
                                layerwise=layerwise)
            record["stage"] = "load"
            logging.getLogger("vllm").addHandler(_Warnings(record["warnings"]))  # building configures vLLM's logging anew
            with recorder.watching():
                with _timed(seconds, "load"):
                    deliver_round(model, config, request)
                if layerwise.layers:
                    record["stage"] = "process"
                    _process(model, config, request, layerwise)
                # digests are ours, not the model's: keep them out of the record
                with torch._C._DisableTorchDispatch(), _timed(seconds, "digest"):
                    record["digests"]["loaded"] = tensor_digests(model)
                _reload_rounds(model, config, request, recorder, record)
            record["stage"] = "done"
    except BaseException as e:  # a crash of vLLM's code is a result; so is KeyboardInterrupt inside it
        record["error"] = _error(e, request)
    if recorder is not None:
        with _timed(seconds, "report"):
            record.update(recorder.report(), event_kinds=EVENT_KINDS)
        record["layout"] = layout_digests(record)
        _thin(record)
        save_file(recorder.event_columns(), out / "events.safetensors")
    write_json(out / "record.json", record)


def _by_hand(model: Any, config: Any, request: dict) -> str:
    """Run a reader's own lines with `model` (poisoned, nothing loaded) and `tensors` (by name); return what they print."""
    text = io.StringIO()
    names = dict(model=model, config=config, tensors=Tensors(request, request["device"]), torch=torch)
    with contextlib.redirect_stdout(text):
        try:
            exec(compile(request["script"], "<by hand>", "exec"), names)
        except Exception as e:  # told as Python would, from the reader's own line on
            print(_error(e.with_traceback(e.__traceback__.tb_next), request)["traceback"], end="")
    return text.getvalue()


def _process(model: Any, config: Any, request: dict, layerwise: Layerwise) -> None:
    """Do what vLLM's loaders do after `load_weights`: finalize layers that still wait, then process the model."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    if layerwise.layers:
        layerwise.module.finalize_layerwise_processing(model, config.model_config)
    process_weights_after_loading(model, config.model_config, torch.device(request["device"]))


def _reload_rounds(model: Any, config: Any, request: dict, recorder: Recorder, record: dict) -> None:
    """Load the same weights again with vLLM's own layerwise reload, as a weight update does."""
    if request["rounds"] < 2:
        return
    from vllm.model_executor.model_loader import reload

    if not recorder.layerwise.layers:
        record["stage"] = "process"
        _process(model, config, request, recorder.layerwise)
    for number in range(1, request["rounds"] + 1):
        if number > 1:
            record["stage"] = "reload"
            recorder.round = number - 1
            with torch.device(request["device"]), _timed(record["seconds"], f"reload {number}"):
                reload.initialize_layerwise_reload(model)
                deliver_round(model, config, request)
                reload.finalize_layerwise_reload(model, config.model_config)
        recorder.rescan()
        with torch._C._DisableTorchDispatch():
            record["digests"][f"round {number}"] = tensor_digests(model)


class _Warnings(logging.Handler):
    """Keep what vLLM warned of while loading, each sentence once."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.into = into

    def emit(self, message: logging.LogRecord) -> None:
        text = message.getMessage()
        if text not in self.into and len(self.into) < 50:
            self.into.append(text)


def _thin(record: dict[str, Any]) -> None:
    """Keep the spans of parameters that are not whole, and of small maps; the counts are always there."""
    for p in record["parameters"]:
        if p["written"] + p["padding"] == p["elements"] and len(p["spans"]) > 64:
            p["spans"] = []


def _environment(request: dict[str, Any]) -> dict[str, Any]:
    import vllm

    device = torch.cuda.get_device_name() if request["device"] == "cuda" else request["device"]
    return dict(vllm=vllm.__version__, torch=torch.__version__, python=platform.python_version(), device=device,
                load_only=False, notes=list(request.get("notes", ())))


def _error(e: BaseException, request: dict[str, Any]) -> dict[str, Any]:
    """Describe an exception with file names relative to the packages they belong to, and the checkpoint as it was named."""
    roots = sorted({os.path.abspath(p) + os.sep for p in sys.path if p}, key=len, reverse=True)

    def relative(file: str) -> str:
        for root in roots:
            if file.startswith(root):
                return file.removeprefix(root)
        return os.path.basename(file)

    where = [dict(file=relative(f.filename), line=f.lineno, function=f.name) for f in traceback.extract_tb(e.__traceback__)]
    def private(text: str) -> str:
        text = text.replace(request["checkpoint"], request["source"])
        for root in roots:
            text = text.replace(root, "")
        return re.sub(r"0x[0-9a-f]{6,}", "0x…", text)

    return dict(type=type(e).__name__, message=private(str(e)), where=where, traceback=private("".join(traceback.format_exception(e))),
                cannot_build=isinstance(e, CannotBuild))


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - start, 4)
