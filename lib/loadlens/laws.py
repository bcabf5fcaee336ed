"""The five laws of correct loading, judged over a run.

    L1 PASS        the same values as one sorted load, in all 53 parameters
    L2 FAIL        98,304 of 2,580,744 elements were not written from the checkpoint: ….wk_weights_proj.weight
    L3 FAIL        6 of 85 delivered tensors were lost
    L4 UNRESOLVED  no layer is processed while loading here: there is no online quantization
    L5 UNRESOLVED  delivered once; ask for two rounds to test it

A verdict is PASS only when the run shows it. What a run can't show (values on the meta device, an extent the
recorder could not follow, a process that died) is UNRESOLVED, with the reason.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .patterns import collapse
from .timing import LayerTiming, timing

__all__ = ["FAIL", "LAWS", "PASS", "UNRESOLVED", "Finding", "Verdict", "judge"]

PASS, FAIL, UNRESOLVED = "PASS", "FAIL", "UNRESOLVED"

LAWS = {
    "L1": "Delivery independence. The loaded model does not depend on order, call boundaries or buffer lifetime.",
    "L2": "Full coverage. Every element of every loadable parameter is written from the checkpoint.",
    "L3": "No lost tensor. Every delivered tensor reaches a parameter, or is refused out loud.",
    "L4": "On-time processing. A layer is processed exactly once: not before its last element, not later than it must.",
    "L5": "Idempotent reload. Loading the same weights again changes nothing.",
}


@dataclass(frozen=True)
class Finding:
    """One place where a run broke a law."""

    law: str
    tensor: str | None  # the delivered tensor, by its name in the checkpoint
    parameter: str | None  # the model's parameter
    elements: int  # how many of the parameter's elements, or of the tensor's bytes for a lost tensor
    of: int
    when: str  # where in the load, in calls and deliveries
    why: str


@dataclass(frozen=True)
class Verdict:
    """What one run says of one law."""

    law: str
    outcome: str
    sentence: str
    findings: tuple[Finding, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def judge(record: dict[str, Any] | None, reference: dict[str, Any] | None, failure: str | None = None) -> dict[str, Verdict]:
    """Judge all five laws; `reference` is the record of one sorted load by the same vLLM, `failure` why there is no record."""
    if record is None or record["error"] and record["stage"] == "build":
        why = failure or f"the model could not be built: {_said(record['error'])}"
        return {law: Verdict(law, UNRESOLVED, why) for law in LAWS}
    if record["error"]:
        return _judge_raised(record, reference)
    return {v.law: v for v in (_l1(record, reference), _l2(record), _l3(record), _l4(record, reference), _l5(record))}


def _judge_raised(record: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, Verdict]:
    """An exception out of the load: a refusal out loud, and a broken L1 when one sorted load does not raise."""
    said = _said(record["error"])
    out = {law: Verdict(law, UNRESOLVED, f"the load did not finish: {said}") for law in LAWS}
    if record["stage"] in ("load", "reload") and record.get("steps"):
        out["L4"] = _l4(record, reference)
    if record["stage"] == "reload":
        out["L5"] = Verdict("L5", FAIL, f"the second round raised {said}", (Finding("L5", None, None, 0, 0, "reload", said),))
    elif reference is None or reference["error"]:
        out["L1"] = Verdict("L1", UNRESOLVED, f"one sorted load raises too: {said}")
    else:
        delivered = record["deliveries"].get("name") or ["nothing"]
        finding = Finding("L1", delivered[-1], None, 0, 0, f"delivery {len(delivered)}", said)
        out["L1"] = Verdict("L1", FAIL, f"raised {said}, where one sorted load does not", (finding,))
    return out


def _said(error: dict[str, Any]) -> str:
    """Name an exception, the place in vLLM that raised it and the first line of its message."""
    at = next((w for w in reversed(error["where"]) if w["file"].startswith("vllm")), None)
    place = f" at {at['file']}:{at['line']} in {at['function']}" if at else ""
    return f"{error['type']}{place}" + (f": {error['message'].splitlines()[0]}" if error["message"].strip() else "")


def _l1(record: dict[str, Any], reference: dict[str, Any] | None) -> Verdict:
    if reference is None or reference["error"]:
        why = "there is no sorted load to compare with" + (f": it raised {reference['error']['type']}" if reference else "")
        return Verdict("L1", UNRESOLVED, why)
    here, there = record["layout"], reference["layout"]
    by_name = {p["name"]: p for p in record["parameters"]}
    moved = [n for n in here if here[n] != there.get(n)] + [n for n in there if n not in here]
    digests, expected = record["digests"].get("loaded", {}), reference["digests"].get("loaded", {})
    # memory that neither load wrote differs by chance, not by delivery: that is L2's finding
    by_chance = {n for n in here if here[n] == there.get(n) and by_name.get(n, {}).get("unwritten")}
    wrong = [n for n in expected if digests.get(n) != expected[n] and n not in by_chance] if digests else moved
    stale = {s["delivery"] for s in record["stale"]}
    names = record["deliveries"]["name"]
    findings = []
    for n in wrong:
        p = by_name.get(n, dict(unwritten=0, elements=0, spans=[]))
        sources = {i for _, _, _, ids in p["spans"] for i in ids}
        why = "elements that nobody wrote" if p["unwritten"] else "other tensors than in the sorted load" if n in moved else "other values"
        read_late = sorted(stale & sources) or (sorted(stale) if not p["unwritten"] and n in moved else [])
        if read_late:
            why = "memory read after the producer had overwritten it"
        findings.append(Finding("L1", names[read_late[0]] if read_late else None, n, p["unwritten"], p["elements"], "after the load", why))
    if wrong:
        return Verdict("L1", FAIL, f"{len(wrong):,} of {len(there):,} parameters differ from one sorted load: {_some(wrong)}", tuple(findings))
    if not digests:
        return Verdict("L1", UNRESOLVED, "every element comes from the same tensor as in one sorted load; meta has no values to compare")
    aside = f"; {len(by_chance):,} more hold memory that neither load wrote" if by_chance else ""
    return Verdict("L1", PASS, f"the same values as one sorted load, in all {len(digests) - len(by_chance):,} parameters{aside}")


def _l2(record: dict[str, Any]) -> Verdict:
    findings, unsure = [], []
    total = sum(p["elements"] for p in record["parameters"])
    for p in record["parameters"]:
        # what nobody wrote must also be poison; where the record is imprecise, only the poison says so
        unwritten = min(p["unwritten"], p["poisoned"]) if p["poisoned"] is not None else 0 if p["imprecise"] else p["unwritten"]
        if p["imprecise"] or p["poisoned"] is not None and p["poisoned"] != p["unwritten"]:
            unsure.append(p["name"])
        for count, why in ((unwritten, "never written"), (0 if p.get("late") else p["constant"], "filled with a constant, not from the checkpoint")):
            if count:
                first = next((s for s in p["spans"] if s[2] == ("unwritten" if why == "never written" else "constant")), None)
                where = f"from element {first[0]:,}" if first else "in several places"
                findings.append(Finding("L2", None, p["name"], count, p["elements"], where, why))
    if findings:
        missing = sum(f.elements for f in findings)
        return Verdict("L2", FAIL, f"{missing:,} of {total:,} elements were not written from the checkpoint: {_some(f.parameter for f in findings)}", tuple(findings))
    if unsure:
        return Verdict("L2", UNRESOLVED, f"the recorder and the memory disagree, or an extent is unknown: {_some(unsure)}")
    padding = sum(p["padding"] for p in record["parameters"])
    extra = f", {padding:,} of padding aside" if padding else ""
    checked = "" if record["poison"] is None else "; no poison left in memory"
    return Verdict("L2", PASS, f"all {total - padding:,} elements were written from the checkpoint{extra}{checked}")


def _l3(record: dict[str, Any]) -> Verdict:
    d = record["deliveries"]
    findings = []
    for i, fate in enumerate(d["fate"]):
        if fate in ("lost", "held", "orphaned"):
            findings.append(Finding("L3", d["name"][i], None, d["nbytes"][i], d["nbytes"][i], _when(record, i), _why_lost(record, i)))
    skipped = sum(f == "skipped" for f in d["fate"])
    if findings:
        return Verdict("L3", FAIL, f"{len(findings):,} of {len(d['name']):,} delivered tensors were lost: {_some(f.tensor for f in findings)}", tuple(findings))
    extra = f", {skipped:,} of them skipped by vLLM's own declaration" if skipped else ""
    late = sum(f == "stale" for f in d["fate"])
    extra += f", {late:,} of them only after the producer had overwritten them" if late else ""
    return Verdict("L3", PASS, f"all {len(d['name']):,} delivered tensors reached a parameter{extra}")


def _when(record: dict[str, Any], delivery: int) -> str:
    call = record["deliveries"]["call"][delivery]
    return f"delivery {delivery + 1} of {len(record['deliveries']['name'])}, in {_call_name(record, call)}"


def _call_name(record: dict[str, Any], call: int) -> str:
    if call < 0:
        return "no call"
    c = record["calls"][call]
    same = [x["id"] for x in record["calls"] if x["module"] == c["module"]]
    which = f", call {same.index(call) + 1} of {len(same)}" if len(same) > 1 else ""
    return f"{c['cls']}.load_weights{which}"


def _why_lost(record: dict[str, Any], i: int) -> str:
    d = record["deliveries"]
    if d["fate"][i] == "orphaned":
        return "written to a parameter that processing had replaced by another"
    if d["died"][i] < 0 or d["fate"][i] == "held":
        return "still held at the end of the load, and never used"
    tick = d["died"][i]
    # a local that held the tensor dies between the last thing its call did and the call's end
    ended = next((c for c in reversed(record["calls"]) if c["left"] in (tick, tick + 1) and c["parent"] >= 0), None)
    if ended:
        return f"its last reference died when {ended['cls']}.load_weights returned"
    return "dropped without being written"


def _l4(record: dict[str, Any], reference: dict[str, Any] | None = None) -> Verdict:
    layers = timing(record, reference)
    if not layers:
        return Verdict("L4", UNRESOLVED, "no layer is processed while loading here: there is no online quantization")
    wrong = [t for t in layers if t.state != "on time"]
    findings = tuple(Finding("L4", t.missed[0] if t.missed else None, t.layer, t.missing, t.total, _when_processed(t), _why_wrong(t))
                     for t in wrong)
    if wrong:
        kinds = {state: [t.layer for t in wrong if t.state == state] for state in ("early", "late", "never", "repeated")}
        said = "; ".join(f"{len(names):,} {state}: {_some(names)}" for state, names in kinds.items() if names)
        return Verdict("L4", FAIL, f"of {len(layers):,} layers that process while loading, {said}", findings)
    if record["error"]:
        return Verdict("L4", UNRESOLVED, "the load did not finish; the layers processed so far were on time")
    return Verdict("L4", PASS, f"all {len(layers):,} layers were processed once, with their last element")


def _when_processed(t: LayerTiming) -> str:
    if t.trigger is None:
        return f"never, at {t.load_numel:,} of {t.total:,}"
    return f"processed {'at ' + t.at if t.at else 'by finalize'}, at {t.load_numel:,} of {t.total:,}"


def _why_wrong(t: LayerTiming) -> str:
    return {
        "early": f"{t.missing:,} elements came after it was processed",
        "late": f"{t.missing:,} elements were never counted, so the counter could not reach its total",
        "never": "it was still waiting when the load ended",
        "repeated": "it was processed more than once",
    }[t.state]


def _l5(record: dict[str, Any]) -> Verdict:
    rounds = sorted(k for k in record["digests"] if k.startswith("round"))
    if len(rounds) < 2:
        return Verdict("L5", UNRESOLVED, "delivered once; ask for two rounds to test it")
    first, last = record["digests"][rounds[0]], record["digests"][rounds[-1]]
    if not first:
        return Verdict("L5", UNRESOLVED, "meta has no values to compare")
    wrong = sorted(n for n in first if last.get(n) != first[n]) + sorted(n for n in last if n not in first)
    if wrong:
        loaded = record["digests"]["loaded"]
        raw = "the values as loaded, not as the first round's processing left them"
        found = tuple(Finding("L5", None, n, 0, 0, rounds[-1], raw if last.get(n) == loaded.get(n) else "other values than after the first round")
                      for n in wrong)
        return Verdict("L5", FAIL, f"{len(wrong):,} of {len(first):,} parameters changed when the same weights came again: {_some(wrong)}", found)
    return Verdict("L5", PASS, f"unchanged after {len(rounds)} rounds, in all {len(first):,} parameters")


def _some(names: Any, most: int = 2) -> str:
    groups = collapse(names)
    text = ", ".join(pattern for pattern, _ in groups[:most])
    return text + (f" and {len(groups) - most} more" if len(groups) > most else "")
