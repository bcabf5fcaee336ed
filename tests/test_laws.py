"""Each law over records made by hand: one that keeps it, one that breaks it, and one that can't say."""

import copy

import pytest

from loadlens.laws import FAIL, LAWS, PASS, UNRESOLVED, Finding, judge

SHAPE, ELEMENTS = [4, 2], 8


def parameter(name="w", **more):
    """A parameter of 4 x 2 that one delivery wrote."""
    whole = dict(name=name, aliases=[], shape=SHAPE, dtype="float32", elements=ELEMENTS, written=ELEMENTS, constant=0,
                 padding=0, unwritten=0, twice=0, imprecise=False, poisoned=0, late=False,
                 spans=[[0, ELEMENTS, "written", [0]]])
    return whole | more


def half(name="w", what="unwritten", **more):
    """The same, of which only the first half was written."""
    counts = {"written": 4, what: 4, "poisoned": 4 if what == "unwritten" else 0}
    return parameter(name, spans=[[0, 4, "written", [0]], [4, 8, what, []]], **counts | more)


@pytest.fixture
def record():
    """A healthy load: two tensors, two parameters, one outer and one inner call."""
    return dict(
        schema=1, stage="done", error=None, poison=255, skipped={}, stale=[], steps=[], warnings=[],
        deliveries=dict(name=["a", "b"], round=[0, 0], outer=[0, 0], call=[1, 1], nbytes=[32, 32], born=[3, 5],
                        died=[5, 7], died_in=[1, 1], alive=[32, 64], fate=["written", "written"]),
        calls=[dict(id=0, parent=-1, round=0, module="", cls="Model", entered=1, left=8, tensors=2, first=0, last=1),
               dict(id=1, parent=0, round=0, module="part", cls="Part", entered=2, left=7, tensors=2, first=0, last=1)],
        parameters=[parameter("w"), parameter("v", spans=[[0, ELEMENTS, "written", [1]]])],
        digests=dict(loaded=dict(w="w1", v="v1")), layout=dict(w="from a", v="from b"),
    )


@pytest.fixture
def reference(record):
    return copy.deepcopy(record)


def says(law, record, reference=None, failure=None):
    v = judge(record, reference, failure)[law]
    return f"{v.outcome}: {v.sentence}"


def findings(law, record, reference=None) -> tuple[Finding, ...]:
    return judge(record, reference)[law].findings


IN_TORCH = dict(file="torch/_ops.py", line=3, function="f")
IN_VLLM = dict(file="vllm/layers/linear.py", line=12, function="load")
RAISED = "AssertionError at vllm/layers/linear.py:12 in load"


def with_error(record, stage="load", type="AssertionError", message="", where=(IN_VLLM, IN_TORCH)):
    """The same record, ended by an exception."""
    error = dict(type=type, message=message, where=list(where), traceback="", cannot_build=False)
    return record | dict(stage=stage, error=error)


def test_there_are_five_laws_each_with_a_name_and_a_sentence():
    assert list(LAWS) == ["L1", "L2", "L3", "L4", "L5"]
    assert [text.partition(". ")[0] for text in LAWS.values()] == [
        "Delivery independence", "Full coverage", "No lost tensor", "On-time processing", "Idempotent reload"]


def test_a_healthy_load_keeps_the_first_three_and_says_nothing_of_the_others(record, reference):
    verdicts = judge(record, reference)
    assert list(verdicts) == list(LAWS)
    assert [v.outcome for v in verdicts.values()] == [PASS, PASS, PASS, UNRESOLVED, UNRESOLVED]
    assert not any(v.findings for v in verdicts.values())
    sentence = "all 16 elements were written from the checkpoint; no poison left in memory"
    assert verdicts["L2"].to_dict() == dict(law="L2", outcome=PASS, sentence=sentence, findings=())


# --- L1


def test_l1_the_same_values_as_one_sorted_load(record, reference):
    assert says("L1", record, reference) == "PASS: the same values as one sorted load, in all 2 parameters"


def test_l1_other_values(record, reference):
    record["digests"]["loaded"]["w"] = "w2"
    assert says("L1", record, reference) == "FAIL: 1 of 2 parameters differ from one sorted load: w"
    (finding,) = findings("L1", record, reference)
    assert (finding.parameter, finding.why, finding.when) == ("w", "other values", "after the load")


def test_l1_other_tensors(record, reference):
    record["digests"]["loaded"]["w"], record["layout"]["w"] = "w2", "from b"
    assert findings("L1", record, reference)[0].why == "other tensors than in the sorted load"


def test_l1_elements_that_nobody_wrote(record, reference):
    record["digests"]["loaded"]["w"], record["layout"]["w"] = "w2", "half from a"
    record["parameters"][0] = half()
    (finding,) = findings("L1", record, reference)
    assert (finding.elements, finding.of, finding.why) == (4, 8, "elements that nobody wrote")


def test_l1_a_stale_read_names_the_tensor_that_was_meant(record, reference):
    record["digests"]["loaded"]["w"], record["layout"]["w"] = "w2", "from b"
    record["parameters"][0]["spans"] = [[0, 8, "written", [1]]]
    record["stale"] = [dict(delivery=0, holds=[1], op="aten.copy_.default", tick=6, call=1)]
    (finding,) = findings("L1", record, reference)
    assert (finding.tensor, finding.parameter) == ("a", "w")
    assert finding.why == "memory read after the producer had overwritten it"


def test_l1_memory_that_neither_load_wrote_is_not_blamed_on_the_delivery(record, reference):
    for r, garbage in ((record, "poison FF"), (reference, "poison 7B")):
        r["parameters"][0], r["layout"]["w"], r["digests"]["loaded"]["w"] = half(), "half from a", garbage
    assert says("L1", record, reference) == (
        "PASS: the same values as one sorted load, in all 1 parameters; 1 more hold memory that neither load wrote")
    assert says("L2", record) == "FAIL: 4 of 16 elements were not written from the checkpoint: w"
    record["layout"]["w"] = "the other half from a"  # but it is when the two loads differ in what they wrote
    assert says("L1", record, reference) == "FAIL: 1 of 2 parameters differ from one sorted load: w"


def test_l1_a_parameter_that_only_one_load_left_behind_differs(record, reference):
    del record["digests"]["loaded"]["v"], record["layout"]["v"]
    assert says("L1", record, reference) == "FAIL: 1 of 2 parameters differ from one sorted load: v"


def test_l1_without_a_sorted_load(record, reference):
    assert says("L1", record) == "UNRESOLVED: there is no sorted load to compare with"
    broken = with_error(reference, type="ValueError", message="no")
    assert says("L1", record, broken) == "UNRESOLVED: there is no sorted load to compare with: it raised ValueError"


def test_l1_on_meta_compares_where_each_element_came_from(record, reference):
    for r in (record, reference):
        r["digests"] = {}
    assert says("L1", record, reference) == (
        "UNRESOLVED: every element comes from the same tensor as in one sorted load; meta has no values to compare")
    record["layout"]["w"] = "from b"
    assert says("L1", record, reference) == "FAIL: 1 of 2 parameters differ from one sorted load: w"


# --- L2


def test_l2_every_element_written(record):
    assert says("L2", record) == "PASS: all 16 elements were written from the checkpoint; no poison left in memory"


def test_l2_elements_never_written(record):
    record["parameters"][0] = half()
    assert says("L2", record) == "FAIL: 4 of 16 elements were not written from the checkpoint: w"
    assert findings("L2", record) == (Finding("L2", None, "w", 4, 8, "from element 4", "never written"),)


def test_l2_a_constant(record):
    record["parameters"][0] = half(what="constant")
    assert says("L2", record) == "FAIL: 4 of 16 elements were not written from the checkpoint: w"
    assert findings("L2", record)[0].why == "filled with a constant, not from the checkpoint"


def test_l2_as_many_constant_as_unwritten_elements_are_two_findings_in_two_places(record):
    record["parameters"][0] = parameter(written=0, constant=4, unwritten=4, poisoned=4,
                                        spans=[[0, 4, "constant", []], [4, 8, "unwritten", []]])
    assert [(f.when, f.why.split(",")[0]) for f in findings("L2", record)] == [
        ("from element 4", "never written"), ("from element 0", "filled with a constant")]
    assert says("L2", record) == "FAIL: 8 of 16 elements were not written from the checkpoint: w"


def test_l2_padding_is_set_aside(record):
    record["parameters"][0] = half(what="padding")
    assert says("L2", record) == ("PASS: all 12 elements were written from the checkpoint, 4 of padding aside; "
                                  "no poison left in memory")


@pytest.mark.parametrize("doubt", [
    dict(poisoned=0, unwritten=8),  # written past the recorder
    dict(poisoned=8),  # poison where the recorder saw a write
    dict(imprecise=True),
    dict(imprecise=True, unwritten=8, poisoned=None),  # on meta
])
def test_l2_is_unresolved_when_recorder_and_memory_disagree(record, doubt):
    record["parameters"][0] |= doubt
    assert says("L2", record) == "UNRESOLVED: the recorder and the memory disagree, or an extent is unknown: w"
    assert findings("L2", record) == ()


def test_l2_poison_is_enough_to_fail_an_imprecise_record(record):
    record["parameters"][0] |= dict(imprecise=True, unwritten=8, poisoned=3)
    assert says("L2", record) == "FAIL: 3 of 16 elements were not written from the checkpoint: w"


def test_l2_on_meta_has_the_record_alone(record):
    record["poison"] = None
    for p in record["parameters"]:
        p["poisoned"] = None
    assert says("L2", record) == "PASS: all 16 elements were written from the checkpoint"
    record["parameters"][0] = half(poisoned=None)
    assert says("L2", record) == "FAIL: 4 of 16 elements were not written from the checkpoint: w"


# --- L3


def test_l3_every_tensor_reached_a_parameter(record):
    assert says("L3", record) == "PASS: all 2 delivered tensors reached a parameter"


def test_l3_a_lost_tensor_is_named_with_its_delivery_and_the_call_it_died_with(record):
    record["deliveries"]["fate"][1] = "lost"
    assert says("L3", record) == "FAIL: 1 of 2 delivered tensors were lost: b"
    assert findings("L3", record) == (
        Finding("L3", "b", None, 32, 32, "delivery 2 of 2, in Part.load_weights",
                "its last reference died when Part.load_weights returned"),)


def test_l3_a_call_is_told_from_its_namesakes(record):
    record["calls"].append(record["calls"][1] | dict(id=2, entered=9, left=12))
    record["deliveries"]["fate"][1], record["deliveries"]["call"][1] = "lost", 2
    assert findings("L3", record)[0].when == "delivery 2 of 2, in Part.load_weights, call 2 of 2"


def test_l3_a_tensor_that_died_on_the_way_was_dropped(record):
    record["deliveries"]["fate"][0] = "lost"
    assert findings("L3", record)[0].why == "dropped without being written"


def test_l3_a_tensor_that_went_to_a_parameter_which_is_no_longer_the_models_is_lost_too(record):
    record["deliveries"]["fate"][1] = "orphaned"
    assert says("L3", record) == "FAIL: 1 of 2 delivered tensors were lost: b"
    assert findings("L3", record)[0].why == "written to a parameter that processing had replaced by another"


def test_l3_a_tensor_that_is_still_held_is_lost_too(record):
    record["deliveries"]["fate"][1], record["deliveries"]["died"][1] = "held", -1
    assert findings("L3", record)[0].why == "still held at the end of the load, and never used"


@pytest.mark.parametrize("fate", ["overwritten", "scalar"])
def test_l3_other_ways_to_be_used_are_no_loss(record, fate):
    record["deliveries"]["fate"][1] = fate
    assert says("L3", record) == "PASS: all 2 delivered tensors reached a parameter"


def test_l3_a_tensor_that_vllm_declares_skipped_is_counted(record):
    record["deliveries"]["fate"][1] = "skipped"
    assert says("L3", record) == ("PASS: all 2 delivered tensors reached a parameter, "
                                  "1 of them skipped by vLLM's own declaration")


# --- L4 and L5


def test_l4_has_nothing_to_judge_where_no_layer_is_processed_while_loading(record):
    assert says("L4", record) == "UNRESOLVED: no layer is processed while loading here: there is no online quantization"


def test_l5_needs_two_rounds(record):
    assert says("L5", record) == "UNRESOLVED: delivered once; ask for two rounds to test it"
    record["digests"] |= {"round 1": {}, "round 2": {}}
    assert says("L5", record) == "UNRESOLVED: meta has no values to compare"


def test_l5_the_same_after_two_rounds(record):
    record["digests"] |= {"round 1": dict(w="p", v="q"), "round 2": dict(w="p", v="q")}
    assert says("L5", record) == "PASS: unchanged after 2 rounds, in all 2 parameters"


def test_l5_changed_by_the_second_round(record):
    record["digests"] |= {"round 1": dict(w="p", v="q"), "round 2": dict(w="w1", v="r")}
    assert says("L5", record) == "FAIL: 2 of 2 parameters changed when the same weights came again: v, w"
    assert {f.parameter: f.why for f in findings("L5", record)} == dict(
        v="other values than after the first round",
        w="the values as loaded, not as the first round's processing left them")


# --- loads that did not finish


def test_no_record_leaves_every_law_unresolved_with_the_reason():
    for law in LAWS:
        assert says(law, None, None, "it was ended by SIGSEGV") == "UNRESOLVED: it was ended by SIGSEGV"


def test_a_model_that_can_not_be_built_leaves_every_law_unresolved_in_one_line(record):
    broken = with_error(record, stage="build", message="131 is not divisible by 2\nmore\nand more")
    for law in LAWS:
        assert says(law, broken) == f"UNRESOLVED: the model could not be built: {RAISED}: 131 is not divisible by 2"


def test_an_exception_that_only_this_delivery_raises_breaks_l1(record, reference):
    raised = with_error(record, message="shapes differ\nand more")
    said = f"{RAISED}: shapes differ"
    assert says("L1", raised, reference) == f"FAIL: raised {said}, where one sorted load does not"
    assert findings("L1", raised, reference) == (Finding("L1", "b", None, 0, 0, "delivery 2", said),)
    for law in ("L2", "L3", "L4", "L5"):
        assert says(law, raised, reference) == f"UNRESOLVED: the load did not finish: {said}"


def test_an_exception_that_every_delivery_raises_is_a_refusal_out_loud(record, reference):
    raised, too = with_error(record), with_error(reference)
    assert says("L1", raised, too) == f"UNRESOLVED: one sorted load raises too: {RAISED}"
    assert says("L1", raised, None).startswith("UNRESOLVED: one sorted load raises too")


def test_an_exception_outside_of_vllm_has_no_place(record, reference):
    raised = with_error(record, type="MemoryError", where=[IN_TORCH])
    assert says("L1", raised, reference) == "FAIL: raised MemoryError, where one sorted load does not"


def test_an_exception_in_the_second_round_breaks_l5(record, reference):
    raised = with_error(record, stage="reload", message="gone")
    assert says("L5", raised, reference) == f"FAIL: the second round raised {RAISED}: gone"
    assert says("L2", raised, reference).startswith("UNRESOLVED: the load did not finish")
