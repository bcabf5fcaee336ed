'''Which tensors vLLM's layerwise loading counts, wraps and re-allocates: the story of a linear layer's bias.

    -SKIP_TENSORS: set[str] = {
    +SKIP_LOAD_TENSORS: set[str] = {
         "e_score_correction_bias",
    -    "bias",
     }
    +SKIP_TENSORS: set[str] = SKIP_LOAD_TENSORS | {"bias"}

Three states. With neither pr49586 nor pr49805, `bias` is in no set. With pr49586 alone, it is in the one set that every
function reads. With both, it is in the set of what stays off the meta device, but not in the set of what is not
counted. No release had the second state. What the two insert is upstream's text: 0.26.0 with both is 0.27.0 there.
'''

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from .base import (ABSENT, PRESENT, Edit, Fix, Found, Parsed, Site, as_in, ends_with, insert, line_at, remove,
                   top_level)

__all__ = ["LateBias", "Pr41424", "Pr49586", "Pr49805"]

RELOAD = "model_executor/model_loader/reload"
META, LAYERWISE, UTILS = f"{RELOAD}/meta.py", f"{RELOAD}/layerwise.py", f"{RELOAD}/utils.py"
ONE, LOAD = "SKIP_TENSORS", "SKIP_LOAD_TENSORS"
SETS = re.compile(rb"\bSKIP_(LOAD_)?TENSORS\b")

BIAS = '    "bias",\n'
EXTRAS = ("set()", '{"bias"}')  # what SKIP_TENSORS adds to SKIP_LOAD_TENSORS: without and with pr49586
# The comments and the docstring of pr49805.
ABOUT_MODULES = "# Modules whose tensors are never moved to, or materialized from, the meta device.\n"
ABOUT_LOAD = "# Tensors never loaded by a weight loader, so the layerwise trigger ignores them.\n"
ABOUT_ONE = ("# Tensors which are never moved to, or materialized from, the meta device.\n"
             "# `bias` is built after create_weights(), so it is never on meta to begin with.\n")
DOC = {ONE: ("    Excludes SKIP_TENSORS (e.g. _expert_map) which are never moved to meta\n"
             "    device and never loaded via weight_loader during layerwise reload.\n"),
       LOAD: ("    Excludes SKIP_LOAD_TENSORS (e.g. _expert_map) which are never loaded via\n"
              "    weight_loader during layerwise reload.\n")}


# --- reading a file


@dataclass(frozen=True)
class _Assigned:
    """A top-level `NAME = value` or `NAME: type = value`; byte ranges in the file."""

    # its lines, without the comments above
    start: int
    end: int
    name: tuple[int, int]
    value: tuple[int, int]
    node: cst.BaseExpression


def _assigned(data: bytes, text: re.Pattern[bytes]) -> dict[str, _Assigned]:
    """Return, by name, the top-level assignments among the statements that contain `text`."""
    found = {}
    name, value = m.SaveMatchedNode(m.Name(), "name"), m.SaveMatchedNode(m.DoNotCare(), "value")
    line = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(name)], value=value)
                                       | m.AnnAssign(target=name, value=value)])
    for start, end in top_level(data, text):
        parsed = Parsed(data, start, end)
        if caught := m.extract(parsed.module.body[0], line):
            found[caught["name"].value] = _Assigned(start, end, parsed.span(caught["name"]),
                                                    parsed.span(caught["value"]), caught["value"])
    return found


def _set_end(data: bytes, names: _Assigned) -> int | None:
    """Return where the line of a set's closing brace starts; None unless it is a set of strings, one a line."""
    strings = m.Set([m.AtLeastN(m.Element(m.SimpleString()), n=1)])
    line = data.rfind(b"\n", 0, names.value[1]) + 1
    return line if m.matches(names.node, strings) and data[line:names.value[1]] == b"}" else None


def _extra(one: _Assigned) -> str | None:
    """Return `{"bias"}` or `set()` when this is `SKIP_LOAD_TENSORS | …`."""
    for text in EXTRAS:
        if one.node.deep_equals(cst.parse_expression(f"{LOAD} | {text}")):
            return text
    return None


def _comment_edits(data: bytes, at: int, text: str, state: str) -> list[Edit]:
    """Return the edit that puts a comment above what starts at `at`, or takes it away. Another comment stays."""
    if state == PRESENT:
        return [remove(data, at, text)] if ends_with(data, at, text) else []
    above = data[data.rfind(b"\n", 0, max(at - 1, 0)) + 1:at]
    return [] if above.startswith(b"#") else [insert(data, at, text)]


# --- the fixes


class Pr49586(Fix):
    """`"bias"` is one of the tensors in SKIP_TENSORS, be they all of the set or what it adds to SKIP_LOAD_TENSORS."""

    name = "pr49586"
    title = "Keep the layerwise loader from re-allocating a layer's bias"
    url = "https://github.com/vllm-project/vllm/pull/49586"
    summary = ("A linear layer's bias is built and loaded as a real tensor while its weight waits on the meta device. "
               "A layer that materializes everything it owns replaces the loaded bias by uninitialized memory. The "
               "guard of pr41424 already prevents that; without pr49805 this change makes the trigger fire before the "
               "last bias.")
    known = (META,)
    look_in = (RELOAD,)
    text = SETS

    def find(self, data: bytes) -> list[Found]:
        """Return the one place that says which tensors SKIP_TENSORS holds besides those that are not counted."""
        names = _assigned(data, self.text)
        if ONE not in names:
            return []
        one = names[ONE]
        if (end := _set_end(data, one)) is not None:
            present = ends_with(data, end, BIAS)
            if not present and b'"bias"' in data[one.start:end]:
                return []  # in another place of the set: to take it back would not be exact
            edit = remove(data, end, BIAS) if present else insert(data, end, BIAS)
        elif (extra := _extra(one)) is not None:
            present, at = extra == '{"bias"}', one.value[0] + len(f"{LOAD} | ")
            edit = Edit(at, one.value[1], b"set()" if present else b'{"bias"}')
        else:
            return []
        return [Found(Site(line_at(data, one.start), ONE, PRESENT if present else ABSENT, ONE), (edit,))]


class Pr49805(Fix):
    """What is not counted and not wrapped is a set of its own, without the bias, and the trigger reads that one."""

    name = "pr49805"
    title = "Wait for the bias before a layer is processed"
    url = "https://github.com/vllm-project/vllm/pull/49805"
    summary = ("Since pr49586 the set of tensors kept off the meta device holds the bias, and the same set says which "
               "tensors are counted and wrapped. So the total leaves the bias out, the layer is processed with its "
               "last weight, and a bias that comes later is loaded into a layer that is in kernel format already.")
    known = (META, LAYERWISE, UTILS)
    look_in = (RELOAD,)
    text = SETS

    FROM_META = m.ImportFrom(module=m.Name("meta"), relative=[m.Dot()])

    def find(self, data: bytes) -> list[Found]:
        """Return the place that defines the sets (meta.py), or the one that reads them (layerwise.py, utils.py)."""
        return self._definition(data) or self._reader(data)

    def _definition(self, data: bytes) -> list[Found]:
        names = _assigned(data, re.compile(SETS.pattern + rb"|\bSKIP_MODULES\b"))
        if ONE not in names:
            return []
        state = PRESENT if LOAD in names else ABSENT
        loading = names[LOAD if state == PRESENT else ONE]
        end = _set_end(data, loading)
        if end is None or not data[end:loading.end].strip() == b"}":
            return []
        if state == PRESENT:
            extra = _extra(names[ONE])
            second = f'\n{ABOUT_ONE}{data[names[ONE].start:names[ONE].end].decode()}'.replace("\r\n", "\n")
            if extra is None or not ends_with(data, names[ONE].end, second):
                return []
            edits = [Edit(*loading.name, ONE.encode()), remove(data, names[ONE].end, second)]
            if extra == '{"bias"}':
                edits.append(insert(data, end, BIAS))
        else:
            bias = ends_with(data, end, BIAS)
            annotation = data[loading.name[1]:loading.value[0]].decode()  # ": set[str] = "
            edits = [Edit(*loading.name, LOAD.encode()),
                     insert(data, loading.end, f'\n{ABOUT_ONE}{ONE}{annotation}{LOAD} | {EXTRAS[bias]}\n')]
            if bias:
                edits.append(remove(data, end, BIAS))
        edits += _comment_edits(data, loading.start, ABOUT_LOAD, state)
        if "SKIP_MODULES" in names:
            edits += _comment_edits(data, names["SKIP_MODULES"].start, ABOUT_MODULES, state)
        where = LOAD if state == PRESENT else ONE
        return [Found(Site(line_at(data, loading.start), where, state, ONE), tuple(edits))]

    def _reader(self, data: bytes) -> list[Found]:
        sets, edits, uses, imported = m.Name(ONE) | m.Name(LOAD), [], [], False
        for start, end in top_level(data, self.text):
            parsed = Parsed(data, start, end)
            statement = parsed.module.body[0]
            read = m.findall(statement, sets)
            edits += [(name.value, parsed.span(name)) for name in read]
            imported |= any(m.findall(line, sets) for line in m.findall(statement, self.FROM_META))
            if isinstance(statement, cst.FunctionDef) and read:
                uses.append((statement.name.value, parsed.span(read[-1])[0]))
        names = {name for name, _ in edits}
        if len(names) != 1 or not uses or not imported:
            return []  # reads neither, or both, or sets of its own
        (old,), new = names, (names ^ {ONE, LOAD}).pop()
        swaps = [Edit(*span, new.encode()) for _, span in edits]
        doc = as_in(data, DOC[old])
        if (at := data.find(doc)) >= 0:
            swaps.append(Edit(at, at + len(doc), as_in(data, DOC[new])))
        where, offset = uses[-1]
        return [Found(Site(line_at(data, offset), where, PRESENT if old == LOAD else ABSENT, old), tuple(swaps))]


class Pr41424(Fix):
    """`materialize_layer` re-allocates a tensor only when it is on the meta device."""

    name = "pr41424"
    title = "Re-allocate only what is on the meta device"
    url = "https://github.com/vllm-project/vllm/pull/41424"
    summary = ("A layer is materialized once its weights have come. Without this, that re-allocates every tensor that "
               "is not in SKIP_TENSORS, also a bias that was loaded before its loader was wrapped: it then holds "
               "uninitialized memory. Seen only while pr49586, which puts the bias in that set, is taken back as "
               "well.")
    known = (META,)
    look_in = (RELOAD,)
    text = re.compile(rb"\bdef materialize_layer\b")

    GUARD = " and tensor.is_meta"
    TEST = m.Comparison(m.Name("name"), [m.ComparisonTarget(m.NotIn(), m.Name(ONE))])
    BODY = m.IndentedBlock([m.SimpleStatementLine([m.Expr(m.Call(m.Name("setattr")))])])

    def find(self, data: bytes) -> list[Found]:
        """Return the `if name not in SKIP_TENSORS` in `materialize_layer`, with or without the guard."""
        guarded = m.BooleanOperation(self.TEST, m.And(), m.Attribute(m.Name("tensor"), m.Name("is_meta")))
        found = []
        for start, end in top_level(data, self.text):
            parsed = Parsed(data, start, end)
            for branch in m.findall(parsed.module, m.If(self.TEST | guarded, self.BODY, orelse=None)):
                first, last = parsed.span(branch.test)
                present = data.endswith(self.GUARD.encode(), 0, last)
                edit = remove(data, last, self.GUARD) if present else insert(data, last, self.GUARD)
                state = PRESENT if present else ABSENT
                found.append(Found(Site(line_at(data, first), "materialize_layer", state, "is_meta"), (edit,)))
        return found


class LateBias(Fix):
    """Once the model is built, layers that load online are wrapped and counted again, with what was added since."""

    name = "late-bias"
    title = "Our proposal: count a bias that arrives first (not part of vLLM)"
    url = ""
    summary = ("create_weights() wraps a layer's loaders before the layer has its bias. The bias is wrapped on the "
               "first load of a wrapped tensor, so a bias that arrives before any weight, as in sorted order, is "
               "loaded but never counted: the layer waits for finalize with all its weights in memory. This wraps and "
               "counts once more when the model is built and nothing is loaded yet, where the load counter is 0 and "
               "every parameter exists. A loader that is wrapped already stays as it is, so nothing counts twice; the "
               "bias stays a real tensor and is loaded again from the same values when the layer is processed, so no "
               "value changes.")
    known = (LAYERWISE,)
    look_in = (RELOAD,)
    text = re.compile(rb"\bdef record_metadata_for_reloading\b")

    LOOP = m.For(m.Name("layer"), m.Call(m.Attribute(m.Name("model"), m.Name("modules")), []))
    ADDED = ("        # Parameters added after create_weights() (e.g., `bias`) are there now: wrap and\n"
             "        # count them before the first load, which may be theirs.\n"
             "        if info.can_load():\n"
             "            initialize_online_processing(layer)\n")

    def find(self, data: bytes) -> list[Found]:
        """Return the loop of `record_metadata_for_reloading`, which runs over every layer of a model just built."""
        found = []
        for start, end in top_level(data, self.text):
            parsed = Parsed(data, start, end)
            for loop in m.findall(parsed.module, self.LOOP):
                last = data.find(b"\n", parsed.span(loop.body.body[-1])[1]) + 1
                present = ends_with(data, last, self.ADDED)
                edit = remove(data, last, self.ADDED) if present else insert(data, last, self.ADDED)
                line = line_at(data, parsed.span(loop)[0])
                state = PRESENT if present else ABSENT
                found.append(Found(Site(line, "record_metadata_for_reloading", state, "bias"), (edit,)))
        return found
