"""What the two halves of a run say to each other: plain JSON, with events beside it as safetensors.

    request.json  ->  [worker: build, deliver, record]  ->  record.json + events.safetensors

A request names everything that decides a run. A record says what happened and never what to think of it: laws are
the host's. Neither holds a host name, a user name or a path of this machine except `checkpoint` and `out` in the request.

record.json
    schema        this number; a reader refuses another one
    stage         how far it came: "build", "load", "process", "reload", "done"
    error         null, or {type, message, where: [{file, line, function}], traceback}; files relative to vllm
    environment   {vllm, torch, python, device, load_only, notes: [...]}
    model         {cls, module, parameters, elements, bytes}
    deliveries    columns: name, round, outer, call, nbytes, elements, born, died, died_in, alive, fate
                  fate: written, overwritten, skipped, scalar, held, stale, orphaned, lost; ticks are counts, -1 means never
    calls         [{id, parent, round, module, cls, entered, left, tensors, first, last}], a tree of load_weights calls
    parameters    [{name, aliases, shape, dtype, elements, written, constant, padding, unwritten, twice, imprecise,
                  poisoned, late, spans: [[first, last, what, [deliveries]]]}]
    skipped       {delivery: the vLLM method that said so}
    stale         [{delivery, holds: [deliveries], op, tick, call}]: reads of memory that held something else by then
    steps         [{tick, delivery, round, layer, cls, what, parameter, load_numel, total, alive, elements?, by?}], the
                  layerwise machinery; `what` as in inside/layerwise.py
    warnings      what vLLM warned of, each sentence once
    digests       {"loaded": {parameter: SHA-256}} before processing, keys as in vLLM's weight_checksum.py; and after
                  processing "round 1", "round 2", … when there are rounds; empty on meta
    layout        {parameter: SHA-256 of which tensor each element came from}; exists on meta too
    printed       what a reader's own lines printed (`by_hand`); a record with it has no deliveries
    answers       [{prompt, tokens, logprobs, prompt_logprobs}], nats, null where not finite (`generate`)
    seconds       {build, load, digest, ...}
events.safetensors
    one int64 tensor per column of record.EVENT_COLUMNS
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA", "read_record", "write_json"]

SCHEMA = 1


def write_json(file: Path | str, value: Any) -> None:
    """Write a value so that a reader sees all of it or nothing."""
    file = Path(file)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    draft.replace(file)


def read_record(folder: Path | str) -> dict[str, Any] | None:
    """Read `record.json` from a run's folder; None when the process ended before writing it."""
    file = Path(folder) / "record.json"
    if not file.exists():
        return None
    record = json.loads(file.read_text())
    if record.get("schema") != SCHEMA:
        raise ValueError(f"record has schema {record.get('schema')}, this loadlens reads {SCHEMA}")
    return record
