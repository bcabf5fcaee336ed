"""When a layer processes, and what it missed: hand-made steps, one hazard each."""

from __future__ import annotations

from loadlens.laws import judge
from loadlens.timing import held, owners, timing

LAYER = "layers.0.qkv_proj"
NAMES = ["q.weight", "q.bias"]


def step(what, tick, delivery, load_numel=0, total=10, elements=0, **more):
    return dict(what=what, tick=tick, delivery=delivery, round=0, layer=LAYER, cls="Linear", parameter=None,
                load_numel=load_numel, total=total, alive=0, elements=elements, **more)


def record(*steps, names=NAMES, error=None, stage="done", born=None, died=None):
    n = len(names)
    return dict(
        schema=1, stage=stage, error=error, steps=list(steps), digests={}, layout={}, calls=[], stale=[], poison=0xFF, skipped={},
        parameters=[dict(name=f"{LAYER}.bias", aliases=[], elements=2, written=2, constant=0, padding=0, unwritten=0, poisoned=0,
                         imprecise=False, spans=[[0, 2, "written", [n - 1]]])],
        deliveries=dict(name=list(names), round=[0] * n, call=[-1] * n, nbytes=[8] * n, elements=[8, 2][:n], fate=["written"] * n,
                        born=born or list(range(1, n + 1)), died=died or [-1] * n),
    )


ON_TIME = [step("counted", 2, 0, 8, elements=8), step("counted", 4, 1, 10, elements=2), step("trigger", 5, 1, 10, by="load")]
EARLY = [step("counted", 2, 0, 8, total=8, elements=8), step("trigger", 3, 0, 8, total=8, by="load"),
         step("uncounted", 5, 1, 0, total=None, elements=2)]
LATE = [step("uncounted", 2, 0, 0, elements=2), step("counted", 4, 1, 8, elements=8), step("trigger", 9, 1, 8, by="finalize")]


def only(steps, **more):
    (layer,) = timing(record(*steps, **more))
    return layer


def test_a_layer_that_processes_with_its_last_element_is_on_time():
    t = only(ON_TIME)
    assert (t.state, t.at, t.by, t.load_numel, t.total, t.missed) == ("on time", "q.bias", "load", 10, 10, [])
    assert [a.load_numel for a in t.arrivals] == [8, 10]


def test_a_layer_that_processes_before_its_bias_is_early_by_the_bias():
    t = only(EARLY)
    assert (t.state, t.at, t.missed, t.missing) == ("early", "q.weight", ["q.bias"], 2)


def test_a_layer_whose_first_bias_was_not_counted_is_late_by_it():
    t = only(LATE, names=["q.bias", "q.weight"])
    assert (t.state, t.at, t.by, t.missed, t.missing) == ("late", None, "finalize", ["q.bias"], 2)


def test_a_layer_that_waits_for_padding_only_is_on_time():
    steps = [step("counted", 2, 0, 8, elements=8), step("trigger", 9, 1, 8, by="finalize")]
    assert only(steps).state == "on time"


def test_a_layer_that_never_processes_is_never():
    assert only(ON_TIME[:2]).state == "never"


def test_a_layer_that_processes_twice_is_repeated():
    assert only([*ON_TIME, step("trigger", 7, 1, 10, by="load")]).state == "repeated"


def test_a_tensor_that_raises_in_a_processed_layer_makes_it_early():
    error = dict(type="AssertionError", message="", where=[], traceback="")
    reference = record(*ON_TIME)
    assert owners(reference) == {"q.bias": LAYER}
    broken = record(*EARLY[:2], error=error, stage="load")
    (t,) = timing(broken, reference)
    assert (t.state, t.missed, t.missing) == ("early", ["q.bias"], 2)
    assert judge(broken, reference)["L4"].outcome == "FAIL"


def test_an_error_inside_processing_is_not_blamed_on_its_timing():
    error = dict(type="RuntimeError", message="no such kernel", where=[], traceback="")
    broken = record(ON_TIME[0], step("trigger", 3, 0, 8, total=8, by="load"), names=NAMES[:1], error=error, stage="load")
    (t,) = timing(broken, record(*ON_TIME))
    assert t.state == "on time"
    assert judge(broken, record(*ON_TIME))["L4"].outcome == "UNRESOLVED"


def test_law_4_says_who_was_early_or_late_and_passes_a_healthy_run():
    assert judge(record(*ON_TIME), None)["L4"].sentence == "all 1 layers were processed once, with their last element"
    early = judge(record(*EARLY), None)["L4"]
    assert early.sentence == "of 1 layers that process while loading, 1 early: layers.0.qkv_proj"
    assert early.findings[0].why == "2 elements came after it was processed"
    late = judge(record(*LATE, names=["q.bias", "q.weight"]), None)["L4"]
    assert late.findings[0].why == "2 elements were never counted, so the counter could not reach its total"
    assert judge(record(), None)["L4"].outcome == "UNRESOLVED"


def test_held_bytes_are_those_of_earlier_deliveries_that_still_wait():
    r = record(*ON_TIME, names=["q.weight", "q.bias", "other"], born=[1, 4, 8], died=[6, 6, -1])
    assert held(r, timing(r)) == [0, 8, 0]  # the weight waits while the bias comes; both are gone when `other` does
