"""vllm#46168: where a half of an FP8 pair waits for the other one.

    -        _pending_wk_fp8: dict = {}
    +        _pending_wk_fp8: dict = getattr(self, "_pending_indexer_wk_fp8", None)
    +        if _pending_wk_fp8 is None:
    +            self._pending_indexer_wk_fp8 = _pending_wk_fp8 = {}
"""

from __future__ import annotations

import re

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ByteSpanPositionProvider, CodeSpan, MetadataWrapper

from .base import ABSENT, PRESENT, Edit, Fix, Found, Site, line_at, top_level

__all__ = ["Pr46168"]


class Pr46168(Fix):
    """A half of an FP8 pair, parked in a dict that dies with the call, is kept on the instance instead.

    Not a site: dots3_note, which parks its pair inside a generator and raises when one stays incomplete. It refuses
    out loud, which is what law L3 asks for.
    """

    name = "pr46168"
    title = "Keep a pending FP8 weight or scale between calls of load_weights"
    url = "https://github.com/vllm-project/vllm/pull/46168"
    summary = ("An FP8 weight and its scale are dequantized once both have arrived. The first to arrive waits in a "
               "dict that is local to load_weights, so it is lost when the call ends before the other one comes.")
    known = (
        "model_executor/models/deepseek_v2.py",
        "model_executor/models/deepseek_mtp.py",
        "model_executor/models/mimo_v2.py",
        "models/deepseek_v32/nvidia/model.py",
        "models/deepseek_v32/nvidia/mtp.py",
        "models/deepseek_v32/amd/model.py",
        "models/deepseek_v32/amd/mtp.py",
        "models/glm5next/common/model.py",
        "models/glm5next/common/mtp.py",
        "models/hy_v4/nvidia/model.py",
        "models/hy_v4/nvidia/mtp.py",
        "models/hy_v4/amd/model.py",
    )
    look_in = ("model_executor/models", "models")
    text = re.compile(rb"\bdef load_weights\b[\s\S]*pending_\w*fp8")

    def find(self, data: bytes) -> list[Found]:
        """Return every pending dict of every `load_weights(self, …)`: local (absent) or on the instance (present)."""
        found: list[Found] = []
        for start, end in top_level(data, self.text):
            finder = _PendingDicts(data, start)
            MetadataWrapper(cst.parse_module(data[start:end]), unsafe_skip_copy=True).visit(finder)
            found += finder.found
        return found


class _PendingDicts(cst.CSTVisitor):
    """Collect the places where `load_weights` makes the dict in which half a pair waits."""

    METADATA_DEPENDENCIES = (ByteSpanPositionProvider,)
    PENDING = m.Name(m.MatchIfTrue(lambda name: re.fullmatch(r"_?pending_\w*fp8\w*", name) is not None))
    METHOD = m.FunctionDef(name=m.Name("load_weights"),
                           params=m.Parameters(params=[m.Param(m.Name("self")), m.ZeroOrMore()]))

    def __init__(self, data: bytes, start: int) -> None:
        super().__init__()
        # the whole file, and the offset in it of what is visited
        self.data, self.start = data, start
        self.found: list[Found] = []
        # the classes and functions around the node being visited
        self.around: list[cst.ClassDef | cst.FunctionDef] = []

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.around.append(node)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self.around.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.around.append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self.around.pop()

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        # Also the blocks of an `if` or a `for` in the method, but not those of a function defined in it.
        if [type(outer) for outer in self.around[-2:]] == [cst.ClassDef, cst.FunctionDef] \
                and m.matches(self.around[-1], self.METHOD):
            for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
                self._look_at(statement, following)

    def _look_at(self, statement: cst.BaseStatement, following: cst.BaseStatement | None) -> None:
        value = m.SaveMatchedNode(m.DoNotCare(), "value")
        target = m.SaveMatchedNode(self.PENDING, "name")
        line = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(target)], value=value)
                                           | m.AnnAssign(target=target, value=value)])
        caught = m.extract(statement, line)
        if caught is None:
            return
        name, span = caught["name"].value, self._span(caught["value"])
        if self.data[span.start:span.start + span.length] == b"{}":
            self._add(statement, name, ABSENT, self._edits_to_apply(statement, name, span))
        elif (attr := _instance_attr(caught["value"])) and self._is_guard(following, name, attr):
            self._add(statement, name, PRESENT, self._edits_to_revert(following, span))

    def _is_guard(self, node: cst.BaseStatement | None, name: str, attr: str) -> bool:
        """Is this `if NAME is None: self.ATTR = NAME = {}`, right below?"""
        none = m.Comparison(m.Name(name), [m.ComparisonTarget(m.Is(), m.Name("None"))])
        fresh = m.Assign([m.AssignTarget(m.Attribute(m.Name("self"), m.Name(attr))), m.AssignTarget(m.Name(name))],
                         m.Dict(elements=[]))
        return m.matches(node, m.If(none, m.IndentedBlock([m.SimpleStatementLine([fresh])]), orelse=None,
                                    leading_lines=[]))

    def _edits_to_apply(self, statement: cst.BaseStatement, name: str, value: CodeSpan) -> tuple[Edit, ...]:
        # Annotation and comment stay on the first line, so that taking back finds them where they were.
        attr = "_pending_indexer_wk_fp8" if "wk_fp8" in name else "_" + name.lstrip("_")  # upstream's own names
        start, after = self._span(statement).start, self._next_line(value.start + value.length)
        indent = self.data[self.data.rfind(b"\n", 0, start) + 1:start].decode()
        newline = "\r\n" if self.data[:after].endswith(b"\r\n") else "\n"
        guard = (f"{indent}if {name} is None:{newline}"
                 f"{indent}    self.{attr} = {name} = {{}}{newline}")
        return (Edit(value.start, value.start + value.length, f'getattr(self, "{attr}", None)'.encode()),
                Edit(after, after, guard.encode()))

    def _edits_to_revert(self, guard: cst.If, value: CodeSpan) -> tuple[Edit, ...]:
        last = self._span(guard.body.body[0])
        return (Edit(value.start, value.start + value.length, b"{}"),
                Edit(self._next_line(value.start + value.length), self._next_line(last.start + last.length), b""))

    def _add(self, statement: cst.BaseStatement, name: str, state: str, edits: tuple[Edit, ...]) -> None:
        line = line_at(self.data, self._span(statement).start)
        where = ".".join(node.name.value for node in self.around)
        self.found.append(Found(Site(line, where, state, name), edits))

    def _span(self, node: cst.CSTNode) -> CodeSpan:
        span = self.get_metadata(ByteSpanPositionProvider, node)
        return CodeSpan(self.start + span.start, span.length)

    def _next_line(self, offset: int) -> int:
        return self.data.find(b"\n", offset) + 1 or len(self.data)


def _instance_attr(value: cst.BaseExpression) -> str | None:
    """Return ATTR when this is `getattr(self, "ATTR", None)`."""
    attr = m.SaveMatchedNode(m.SimpleString(), "attr")
    caught = m.extract(value, m.Call(m.Name("getattr"), [m.Arg(m.Name("self")), m.Arg(attr), m.Arg(m.Name("None"))]))
    return caught["attr"].evaluated_value if caught else None
