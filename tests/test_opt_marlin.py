"""The OPT FP8 Marlin assertion on vLLM's own layerwise loader: upstream's numbers, three states, and the silent model."""

from __future__ import annotations

import json

import pytest

import loadlens as ll
from loadlens.trace import trace_events

ONLINE = dict(quantization="fp8", kernel="marlin")
S0, S1, S2 = "0.32.0-pr49805-pr49586", "0.32.0-pr49805", "0.32.0"
QKV = "model.decoder.layers.0.self_attn.qkv_proj"


def load(workers, recipe, delivery, variant, **more):
    return ll.run(f"recipe:{recipe}", delivery=delivery, variant=variant, workers=workers, **{**ONLINE, **more})


def layer(run, name=QKV):
    return next(t for t in run.timing if t.layer == name)


def counted(run, name=QKV):
    return [a.load_numel for a in layer(run, name).arrivals if a.counted]


def outcomes(run):
    return {law: v.outcome for law, v in run.laws.items()}


@pytest.fixture(scope="module")
def crash(workers):
    return load(workers, "opt-125m", "state-dict", S1)


@pytest.fixture(scope="module")
def late(workers):
    return load(workers, "opt-125m", "sorted", S2)


def test_s1_counts_upstreams_numbers_and_processes_at_q_proj_weight(crash):
    assert counted(crash) == [589824, 1179648, 1769472]
    t = layer(crash)
    assert (t.total, t.at, t.by) == (1769472, "model.decoder.layers.0.self_attn.q_proj.weight", "load")
    assert (t.state, t.missed, t.missing) == ("early", ["model.decoder.layers.0.self_attn.q_proj.bias"], 768)
    assert crash.exit_code == 1 and outcomes(crash)["L1"] == outcomes(crash)["L4"] == "FAIL"


def test_s1_raises_upstreams_assertion_behind_upstreams_warning(crash):
    where = crash.error["where"][-1]
    assert (crash.error["type"], where["file"], where["function"]) == ("AssertionError", "vllm/model_executor/layers/linear.py", "weight_loader")
    assert "assert param_data.shape == loaded_weight.shape" in crash.error["traceback"]
    assert any("`output_dim`" in w and "QKVParallelLinear" in w for w in crash.record["warnings"])


def test_s2_counts_upstreams_numbers_and_all_laws_hold(workers):
    run = load(workers, "opt-125m", "state-dict", S2)
    assert counted(run) == [589824, 590592, 1180416, 1181184, 1771008, 1771776]
    t = layer(run)
    assert (t.total, t.at, t.state) == (1771776, "model.decoder.layers.0.self_attn.q_proj.bias", "on time")
    assert run.exit_code == 0 and {run.laws[law].outcome for law in ("L1", "L2", "L3", "L4")} == {"PASS"}
    assert run.held_peak()["peak"] < 0.04 * run.held_peak()["of"]


def test_s2_in_sorted_order_is_late_by_768_elements_and_holds_the_model(late):
    t = layer(late)
    assert (t.state, t.load_numel, t.total, t.missing, t.by) == ("late", 1771008, 1771776, 768, "finalize")
    assert {x.state for x in late.timing} == {"late"} and len(late.timing) == 48
    assert late.held_peak()["peak"] > 0.99 * late.held_peak()["of"]
    assert [law for law, o in outcomes(late).items() if o == "FAIL"] == ["L4"]  # the values are right


def test_s0_has_the_late_trigger_and_not_the_crash(workers):
    assert load(workers, "opt-tiny", "state-dict", S0).outcome == "PASS"
    assert outcomes(load(workers, "opt-tiny", "sorted", S0))["L4"] == "FAIL"


def test_s1_in_sorted_order_does_not_crash(workers):
    assert load(workers, "opt-tiny", "sorted", S1).outcome == "PASS"


def test_late_bias_holds_all_laws_in_every_order(workers):
    for delivery in ("sorted", "state-dict", "file", "per-tensor", "shuffled:1", "shuffled:2"):
        run = load(workers, "opt-tiny", delivery, "0.32.0+late-bias")
        assert run.outcome == "PASS", f"{delivery}: {run}"


def test_gpt2_loads_in_silence_under_s1_and_its_log_probabilities_are_nan(workers):
    run = load(workers, "gpt2", "state-dict", S1)
    assert run.error is None and outcomes(run)["L4"] == outcomes(run)["L1"] == outcomes(run)["L2"] == "FAIL"
    assert layer(run, "transformer.h.0.attn.c_attn").missed == ["transformer.h.0.attn.c_attn.bias"]
    prompt = [[2, 5, 6, 7]]
    silent = ll.generate("recipe:gpt2", prompt, delivery="state-dict", variant=S1, max_tokens=2, workers=workers, **ONLINE)
    healthy = ll.generate("recipe:gpt2", prompt, delivery="state-dict", variant=S2, max_tokens=2, workers=workers, **ONLINE)
    assert all(p is None for p in silent.prompt_logprobs[0])
    assert all(p is not None for p in healthy.prompt_logprobs[0])


def test_a_release_was_silent_too(workers):
    run = load(workers, "opt-tiny", "state-dict", "0.24.0")
    assert run.error is None and layer(run).state == "early"
    assert {f.why for f in run.laws["L3"].findings} == {"written to a parameter that processing had replaced by another"}


def test_without_the_guard_the_first_bias_is_uninitialized_memory(workers):
    run = load(workers, "opt-tiny", "sorted", "0.32.0-pr49805-pr49586-pr41424")
    assert outcomes(run)["L2"] == "FAIL"
    assert all(u["parameter"].endswith("bias") for u in run.uncovered)


def test_a_weight_update_of_a_fused_biased_layer_raises_in_the_released_state(workers):
    run = load(workers, "qwen2-tiny", "state-dict", S2, rounds=2)
    assert run.record["stage"] == "reload" and run.error["type"] == "AssertionError" and outcomes(run)["L5"] == "FAIL"


@pytest.mark.parametrize("recipe", ["opt-tiny", "qwen2-tiny", "llama-tiny"])
def test_an_unquantized_model_is_not_concerned(workers, recipe):
    for delivery in ("state-dict", "sorted"):
        run = load(workers, recipe, delivery, S1, quantization=None, kernel=None)
        assert run.outcome == "PASS" and outcomes(run)["L4"] == "UNRESOLVED"


def test_a_model_without_biases_is_on_time_in_every_state(workers):
    for variant in (S1, S2):
        for delivery in ("state-dict", "sorted"):
            assert outcomes(load(workers, "llama-tiny", delivery, variant))["L4"] == "PASS"


def test_a_trace_has_a_track_a_layer_and_a_counter_and_its_trigger(late, tmp_path):
    file = ll.write_trace(late, tmp_path / "load.json")
    events = json.loads(file.read_text())["traceEvents"]
    assert events == json.loads(json.dumps(trace_events(late)))
    assert {e["ph"] for e in events} == {"M", "X", "b", "e", "C", "i"}
    counter = [e["args"]["load_numel"] for e in events if e["ph"] == "C" and e["name"] == f"{QKV} load_numel"]
    assert counter[-1] == 1771008
    assert sum(e["ph"] == "i" and e["name"] == "trigger (late, by finalize)" for e in events) == 48
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")
    begun, ended = ({e["id"] for e in events if e["ph"] == ph} for ph in "be")
    assert begun == ended == set(range(196))
