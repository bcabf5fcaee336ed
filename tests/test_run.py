"""Runs of vLLM's own code: what vllm#46078 lost and a fix saved, and every way in which a run can end badly.

Tests that share a variant stand together: its worker starts once.
"""

import functools
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import loadlens as ll
from loadlens.run import TIMEOUT
from loadlens.workers import default_workers

GLM, OPT, TINY = "recipe:glm-dsa-fp8", "recipe:opt-125m", "recipe:opt-tiny"
PAIR = [f"model.layers.{layer}.self_attn.indexer.wk.weight{half}" for half in ("_scale_inv", "") for layer in range(3)]
FUSED = [f"model.layers.{layer}.self_attn.indexer.wk_weights_proj.weight" for layer in range(3)]
OTHER_HALF = "model.layers.0.self_attn.indexer.weights_proj.weight"

pytestmark = pytest.mark.usefixtures("workers")


# in the order in which they are needed here
VARIANTS = [None, "0.32.0+pr46168", "0.32.0-pr46168", "0.25.1", "0.24.0", "0.23.0"]


@functools.cache
def load(checkpoint=GLM, **options) -> ll.Run:
    """Run once, and look at the result as often as needed; the next variant imports vLLM meanwhile."""
    at = VARIANTS.index(options.get("variant"))
    for near in VARIANTS[at : at + 2]:
        default_workers().start(ll.resolve(near))
    return ll.run(checkpoint, **options)


@pytest.fixture(scope="module", autouse=True)
def forget_runs():
    yield
    load.cache_clear()


# --- what one run has to show


def assert_whole(run: ll.Run) -> None:
    assert [run.laws[law].outcome for law in ("L1", "L2", "L3")] == ["PASS"] * 3, run
    assert (run.outcome, run.exit_code, run.lost, run.uncovered) == ("PASS", 0, [], [])
    assert_recorder_and_poison_agree(run)


def assert_lost(run: ll.Run, *tensors: str) -> None:
    assert run.laws["L3"].outcome == "FAIL" and sorted(run.lost) == sorted(tensors), run
    assert (run.outcome, run.exit_code) == ("FAIL", 1)


def assert_pair_lost(run: ll.Run) -> None:
    """The six halves are gone, and so are the 128 of 132 rows that they would have filled in each layer."""
    assert_lost(run, *PAIR)
    assert run.uncovered == [dict(parameter=name, elements=32768, of=33792) for name in FUSED]
    assert [f.parameter for f in run.laws["L1"].findings] == FUSED
    assert_recorder_and_poison_agree(run)


def assert_recorder_and_poison_agree(run: ll.Run) -> None:
    """The map of writes and the bytes in memory are two witnesses."""
    for p in run.record["parameters"]:
        assert (p["poisoned"], p["imprecise"]) == (p["unwritten"], False), p["name"]
        assert p["written"] + p["padding"] + p["unwritten"] == p["elements"] and p["constant"] == 0, p["name"]


# --- the installed release: the class that CUDA machines get


@pytest.mark.parametrize("delivery, inner", [("file", 2), ("runai", 2), ("per-tensor", 84)])
def test_the_pair_is_lost_when_a_call_ends_between_its_halves(delivery, inner):
    run = load(delivery=delivery, model_class="nvidia")
    assert_pair_lost(run)
    assert (run.calls.parent >= 0).sum() == inner
    why = {f.why for f in run.laws["L3"].findings}
    assert why == {"its last reference died when DeepseekV32Model.load_weights returned"}


@pytest.mark.parametrize("delivery", ["sorted", "state-dict"])
def test_the_same_class_is_whole_when_both_halves_come_in_one_run_of_names(delivery):
    assert_whole(load(delivery=delivery, model_class="nvidia"))


def test_one_outer_call_becomes_two_inner_calls_with_the_scales_in_the_first():
    calls = load(delivery="file", model_class="nvidia").calls
    assert calls.cls.tolist() == ["DeepseekV32ForCausalLM", "DeepseekV32Model", "DeepseekV32Model"]
    assert calls.tensors.tolist() == [85, 5, 79]
    assert load(delivery="runai", model_class="nvidia").calls.cls.tolist() == calls.cls.tolist()
    assert load(delivery="sorted", model_class="nvidia").calls.tensors.tolist() == [85, 84]


@pytest.mark.parametrize("model_class", ["nvidia", None])
def test_a_parked_half_is_overwritten_when_the_buffer_is_reused_and_no_law_but_the_first_sees_it(model_class):
    run = load(delivery="sorted,reused-buffer", model_class=model_class)
    assert [run.laws[law].outcome for law in ("L1", "L2", "L3")] == ["FAIL", "PASS", "PASS"]
    assert {f.parameter for f in run.laws["L1"].findings} == set(FUSED)
    assert {f.why for f in run.laws["L1"].findings} == {"memory read after the producer had overwritten it"}
    # the weight comes first, and waits for its scale
    assert {f.tensor for f in run.laws["L1"].findings} == set(PAIR[3:])
    assert "read after the producer had overwritten them (3 tensors)" in repr(run).splitlines()


def test_the_streamer_delivers_every_tensor_once_and_the_scales_before_their_weights():
    # about file order: what lies close together may change places, from run to run
    file, runai = (load(delivery=d, model_class="nvidia").deliveries.name.tolist() for d in ("file", "runai"))
    assert file == list(ll.open_checkpoint(GLM).names) and sorted(runai) == sorted(file)
    assert all(runai.index(scale) < runai.index(weight) for scale, weight in zip(PAIR[:3], PAIR[3:]))


def test_the_rows_that_are_left_come_from_the_other_half_of_the_fused_parameter():
    sources = load(delivery="file", model_class="nvidia").sources(FUSED[0])
    assert sources.to_dict("records") == [
        dict(rows="0..127", elements=32768, what="unwritten", tensors=""),
        dict(rows="128..131", elements=1024, what="written", tensors=OTHER_HALF)]
    whole = load(delivery="sorted", model_class="nvidia").sources(FUSED[0])
    assert whole.tensors[0].split(", ") == [PAIR[3], PAIR[0]]


def test_the_report_of_a_broken_run():
    assert repr(load(delivery="file", model_class="nvidia")) == textwrap.dedent("""\
        FAIL  recipe:glm-dsa-fp8 · file · vLLM 0.32.0 · nvidia · cpu
              one call, in file order: 85 tensors in 1 outer call of load_weights, which made 2 inner calls
          L1  FAIL        3 of 53 parameters differ from one sorted load: model.layers.{0..2}.self_attn.indexer.wk_weights_proj.weight
          L2  FAIL        98,304 of 2,580,744 elements were not written from the checkpoint: model.layers.{0..2}.self_attn.indexer.wk_weights_proj.weight
          L3  FAIL        6 of 85 delivered tensors were lost: model.layers.{0..2}.self_attn.indexer.wk.weight_scale_inv, model.layers.{0..2}.self_attn.indexer.wk.weight
          L4  UNRESOLVED  no layer is processed while loading here: there is no online quantization
          L5  UNRESOLVED  delivered once; ask for two rounds to test it

        lost tensors (6 of 85)
          model.layers.{0..2}.self_attn.indexer.wk.weight_scale_inv (x3): its last reference died when DeepseekV32Model.load_weights returned
          model.layers.{0..2}.self_attn.indexer.wk.weight (x3): its last reference died when DeepseekV32Model.load_weights returned

        elements not written from the checkpoint
          model.layers.{0..2}.self_attn.indexer.wk_weights_proj.weight (x3): 32,768 of 33,792 each, never written

        conditions
          load-only: MLAAttention is an empty module here, for this platform has no MLA attention""")


def test_the_report_as_html_says_the_same_and_escapes_what_it_shows():
    html = load(delivery="file", model_class="nvidia")._repr_html_()
    assert "recipe:glm-dsa-fp8 · file · vLLM 0.32.0 · nvidia · cpu" in html
    assert "6 of 85 delivered tensors were lost" in html and "never written" in html
    assert "Every delivered tensor reaches a parameter" in html  # the law's own words, as a tooltip
    assert html.count("<table>") == html.count("</table>") == 1


def test_the_frames_of_a_run():
    run = load(delivery="file", model_class="nvidia")
    assert run.findings.law.tolist() == ["L1"] * 3 + ["L2"] * 3 + ["L3"] * 6
    assert run.coverage.set_index("name").unwritten[FUSED].tolist() == [32768] * 3
    assert run.deliveries.fate.value_counts().to_dict() == dict(written=79, lost=6)
    events = run.events[run.events.parameter == FUSED[0]]
    assert events.source.tolist() == [OTHER_HALF]
    assert (events.elements.tolist(), events.offset.tolist(), events.kind.tolist()) == ([1024], [32768], ["copy"])


def test_a_run_as_plain_values():
    value = load(delivery="file", model_class="nvidia").to_dict()
    assert value == json.loads(json.dumps(value))
    assert set(value) >= {"schema", "checkpoint", "delivery", "variant", "model_class", "outcome", "laws", "lost",
                          "uncovered", "calls", "triggers", "tensors", "seconds", "device", "rounds", "quantization",
                          "error", "environment"}
    assert (value["schema"], value["checkpoint"], value["delivery"], value["variant"]) == (1, GLM, "file", "0.32.0")
    assert (value["model_class"], value["outcome"], value["tensors"], value["error"]) == ("nvidia", "FAIL", 85, None)
    assert sorted(value["laws"]) == ["L1", "L2", "L3", "L4", "L5"] and sorted(value["lost"]) == sorted(PAIR)
    assert value["uncovered"][0] == dict(parameter=FUSED[0], elements=32768, of=33792)
    assert value["environment"]["vllm"] == "0.32.0" and value["environment"]["load_only"]


def test_the_generic_class_keeps_its_pair_between_calls():
    assert_whole(load(delivery="per-tensor"))
    assert_whole(load(delivery="file"))


def test_on_meta_the_same_is_known_without_a_byte():
    run = load(delivery="file", model_class="nvidia", device="meta")
    assert_lost(run, *PAIR)
    assert run.uncovered == load(delivery="file", model_class="nvidia").uncovered
    assert run.laws["L1"].outcome == "FAIL"
    healthy = load(delivery="sorted", model_class="nvidia", device="meta")
    assert [v.outcome for v in healthy.laws.values()][:3] == ["UNRESOLVED", "PASS", "PASS"] and healthy.exit_code == 0


# --- the installed release: a model without hazards

EVERY_DELIVERY = ["sorted", "file", "state-dict", "per-tensor", "per-file", "shuffled:1", "runai",
                  "split:model.decoder.layers.5.fc1.weight"]
REUSED = ["file,reused-buffer", "per-tensor,reused-buffer", "runai,reused-buffer"]


@pytest.mark.parametrize("delivery", [*EVERY_DELIVERY, *REUSED])
def test_opt_is_whole_however_it_is_delivered(delivery):
    run = ll.run(OPT, delivery=delivery)
    assert_whole(run)
    assert run.record["stale"] == [] and run.record["total_bytes"] == 250478592


@pytest.mark.parametrize("delivery", [f"{d},reused-buffer" for d in EVERY_DELIVERY if "split" not in d])
def test_opt_is_whole_out_of_one_reused_buffer(delivery):
    assert_whole(ll.run(TINY, delivery=delivery))


def test_a_reused_buffer_is_read_in_time_and_its_tensors_are_told_apart():
    run = load(TINY, delivery="file,reused-buffer")
    assert run.record["layout"] == load(TINY).record["layout"]
    assert run.record["digests"] == load(TINY).record["digests"]


def test_declared_padding_of_the_vocabulary_is_set_aside():
    assert "of padding aside; no poison left in memory" in ll.run(OPT).laws["L2"].sentence


def test_a_second_round_changes_nothing():
    run = load(TINY, rounds=2)
    parameters = len(run.record["digests"]["loaded"])
    assert run.laws["L5"].sentence == f"unchanged after 2 rounds, in all {parameters} parameters"
    matrices = run.coverage[run.coverage["shape"].map(len) == 2]
    assert matrices.twice.sum() == 0 and set(run.deliveries["round"]) == {0, 1}
    assert run.exit_code == 0


def test_digests_are_those_of_vllms_own_weight_checker(capsys):
    ll.by_hand(TINY, """
        import json
        from vllm.model_executor.model_loader.weight_checksum import compute_tensor_digests
        model.load_weights((name, tensors[name]) for name in sorted(tensors.tensors))
        print(json.dumps(compute_tensor_digests(model)))
        """)
    assert json.loads(capsys.readouterr().out) == load(TINY).record["digests"]["loaded"]


def test_an_unwatched_run_loads_the_same_values():
    run = ll.run(TINY, watch=False, compare=False)
    assert run.record["digests"] == load(TINY).record["digests"] and run.record["events"] == 0


def test_reports_hold_no_path_user_or_host():
    late = ll.run(OPT, timeout=0.01, compare=False)
    for run in (load(delivery="file", model_class="nvidia"), load(TINY), late):
        text = repr(run) + run._repr_html_() + json.dumps(run.to_dict()) + run.findings.to_csv() + str(run.record)
        for private in (str(Path.home()), socket.gethostname(), getpass.getuser() + "@", sys.prefix, os.getcwd()):
            assert private not in text, private


# --- checkpoints that do not fit their model


@pytest.fixture
def tiny(tmp_path):
    """OPT in 36 small tensors, in a folder of its own, to be spoiled."""
    source = ll.open_checkpoint(TINY).path
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())

    def write(change=None, **more):
        if change:
            change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        return tmp_path

    return write


FC1 = "model.decoder.layers.0.fc1.bias"


def test_a_tensor_that_the_checkpoint_lacks_leaves_a_hole_that_no_delivery_is_blamed_for(tiny):
    run = ll.run(tiny(lambda tensors: tensors.pop(FC1)), delivery="file")
    elements = run.coverage.set_index("name").elements[FC1]
    assert run.uncovered == [dict(parameter=FC1, elements=elements, of=elements)] and run.lost == []
    assert [v.outcome for v in run.laws.values()][:3] == ["PASS", "FAIL", "PASS"]
    assert run.laws["L1"].sentence.endswith("parameters; 1 more hold memory that neither load wrote")
    assert_recorder_and_poison_agree(run)


def test_new_values_in_the_same_file_are_compared_with_themselves(tiny):
    before = ll.run(tiny()).record["digests"]["loaded"][FC1]
    run = ll.run(tiny(lambda tensors: tensors[FC1].add_(1)), delivery="file")
    assert_whole(run)
    assert run.record["digests"]["loaded"][FC1] != before


def test_a_tensor_that_the_model_lacks_is_refused_out_loud_by_vllm(tiny):
    folder = tiny(lambda tensors: tensors.update({"model.decoder.layers.0.fc9.bias": torch.ones(4)}))
    run = ll.run(folder, delivery="file")
    assert run.error["type"] in ("KeyError", "ValueError") and "fc9" in run.error["message"]
    assert (run.outcome, run.exit_code) == ("UNRESOLVED", 2)
    said = f"one sorted load raises too: {run.error['type']} at vllm/model_executor/models/"
    assert run.laws["L1"].sentence.startswith(said)


def test_a_tensor_of_another_shape_raises_and_the_report_names_the_line_of_vllm(tiny):
    run = ll.run(tiny(lambda tensors: tensors.update({FC1: torch.ones(7, dtype=torch.float16)})))
    assert run.error["where"][-1]["file"].startswith("vllm/") and run.exit_code == 2
    assert re.fullmatch(r"the load did not finish: \w+ at vllm/[\w/]+\.py:\d+ in \w+.*", run.laws["L2"].sentence)
    assert "Traceback" in run.error["traceback"] and str(Path.home()) not in run.error["traceback"]


def assert_cannot_run(act, *words: str) -> None:
    with pytest.raises(ll.CannotRun) as refused:
        act()
    sentence = str(refused.value)
    assert "\n" not in sentence and all(word in sentence for word in words), sentence


def test_an_unknown_architecture_is_refused_in_vllms_own_words(tiny):
    folder = tiny(architectures=["NoSuchForCausalLM"])
    assert_cannot_run(lambda: ll.run(folder), "vLLM 0.32.0 refuses this checkpoint's config", "NoSuchForCausalLM")


def test_an_unknown_model_class_lists_the_known_ones():
    said = "GlmMoeDsaForCausalLM has no model class 'intel'"
    assert_cannot_run(lambda: ll.run(GLM, model_class="intel"), said, "amd, generic, nvidia")
    said = "OPTForCausalLM has no model class 'nvidia'"
    assert_cannot_run(lambda: ll.run(TINY, model_class="nvidia"), said, "only generic")
    assert_cannot_run(lambda: ll.run(TINY, model_class="vllm.nothing:X"), "vLLM 0.32.0 has no vllm.nothing:X")


def test_a_model_that_can_not_be_built_is_a_result_with_the_reason_in_one_line(tiny):
    run = ll.run(tiny(activation_function="nothing"))
    assert (run.outcome, run.exit_code, run.record["stage"]) == ("UNRESOLVED", 2, "build")
    for v in run.laws.values():
        assert v.sentence.startswith("the model could not be built: ValueError at vllm/") and "\n" not in v.sentence


@pytest.mark.parametrize("options, words", [
    (dict(device="tpu"), "there is no device 'tpu'; choose cpu, meta or cuda"),
    (dict(device="meta", delivery="runai"), "meta has none; use file"),
    (dict(delivery="alphabetic"), "there is no delivery 'alphabetic'"),
    (dict(delivery="split:x"), "has no tensor 'x' to split after"),
    (dict(variant="0.32.0+nothing"), "unknown fix 'nothing'"),
])
def test_options_that_make_no_sense(options, words):
    assert_cannot_run(lambda: ll.run(TINY, **options), words)


def test_a_parameter_that_the_model_lacks_has_no_sources():
    assert_cannot_run(lambda: load(TINY).sources("x"), "the model has no parameter 'x'")


# --- processes that end badly

STOPPED = "and was stopped; give it a larger --timeout, or look at where it hangs"


def children(pid: int) -> list[int]:
    """Process ids below `pid`, all generations."""
    try:
        below = [int(c) for file in Path(f"/proc/{pid}/task").glob("*/children") for c in file.read_text().split()]
    except OSError:  # it ended while we looked
        return []
    return [d for child in below for d in (child, *children(child))]


def worker_of(variant: str | None = None):
    return default_workers().get(ll.resolve(variant))


@pytest.fixture
def worker_survives():
    """The same worker serves the next run, and none of its children is left."""
    worker = worker_of()
    yield
    assert worker.alive() and worker_of() is worker
    assert children(worker.pid) == []
    assert_whole(ll.run(TINY))


def by_hand_ends(lines: str, sentence: str, **options) -> None:
    start = time.monotonic()
    with pytest.raises(ll.CannotRun) as refused:
        ll.by_hand(TINY, lines, **options)
    assert str(refused.value) == f"the lines could not be run: {sentence}"
    assert time.monotonic() - start < 30


@pytest.mark.usefixtures("worker_survives")
@pytest.mark.parametrize("lines, sentence", [
    ("import os; os.kill(os.getpid(), 9)", "its process was ended by SIGKILL; out of memory is the usual reason"),
    ("import ctypes; ctypes.string_at(0)", "its process was ended by SIGSEGV"),
    ("import os; os.abort()", "its process was ended by SIGABRT"),
    ("import os; os._exit(3)", "its process ended with exit code 3"),
    ("import os; os._exit(0)", "it ended without a record"),
])
def test_a_child_that_dies_is_one_sentence(lines, sentence):
    by_hand_ends(lines, sentence)


@pytest.mark.usefixtures("worker_survives")
def test_a_child_that_hangs_is_stopped_with_everything_that_it_started():
    by_hand_ends("import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)",
                 f"it did not end within 4 s {STOPPED}", timeout=4)


@pytest.mark.usefixtures("worker_survives")
def test_a_child_that_leaves_a_process_behind_leaves_none(capsys):
    ll.by_hand(TINY, "import subprocess; subprocess.Popen(['sleep', '600']); print('done')")
    assert capsys.readouterr().out == "done\n"


@pytest.mark.usefixtures("worker_survives")
def test_a_child_out_of_memory_says_so(capsys):
    ll.by_hand(TINY, """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        print("before")
        torch.empty(1 << 34, dtype=torch.uint8)
        """)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "before" and "can't allocate memory" in said[-1] and said[-1].startswith("RuntimeError: ")


@pytest.mark.usefixtures("worker_survives")
def test_a_run_over_its_time_limit_is_a_result():
    run = ll.run(OPT, timeout=0.1, compare=False)
    assert (run.outcome, run.exit_code, run.record, run.error) == ("UNRESOLVED", 2, None, None)
    late = f"the load could not be judged: it did not end within 0.1 s {STOPPED}"
    assert {v.sentence for v in run.laws.values()} == {late} == {run.failure}
    assert repr(run).splitlines()[:2] == [
        "UNRESOLVED  recipe:opt-125m · sorted · vLLM 0.32.0 · cpu", f"      {late}"]
    assert run.findings.empty and run.deliveries.empty and run.calls.empty and run.coverage.empty and run.events.empty
    assert run.to_dict()["tensors"] == 0


def test_a_sorted_load_that_was_stopped_is_no_reference_for_later_runs(tiny):
    folder = tiny()
    stopped = ll.run(folder, timeout=0.001)
    assert stopped.outcome == "UNRESOLVED" and "did not end within 0.001 s" in stopped.why
    assert_whole(ll.run(folder, delivery="file"))


@pytest.mark.usefixtures("worker_survives")
def test_an_exception_by_hand_is_printed_after_what_was_printed_before(capsys):
    ll.by_hand(TINY, "print('first')\nmodel.no_such_thing")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "first"
    assert said[-1] == "AttributeError: 'OPTForCausalLM' object has no attribute 'no_such_thing'"
    assert any('"<by hand>", line 2' in line for line in said) and not any("loadlens" in line for line in said)


def test_a_cold_start_gives_the_same_and_leaves_nothing_behind():
    warm, before = load(TINY), set(children(os.getpid()))
    run = ll.run(TINY, warm=False, compare=False)
    assert run.record["digests"] == warm.record["digests"]
    assert set(children(os.getpid())) <= before


HOST = """
import sys, threading, time
import loadlens as ll
threading.Thread(target=lambda: ll.by_hand("recipe:opt-tiny", "import time; time.sleep(600)"), daemon=True).start()
time.sleep(600)
"""


def wait_for(what, seconds: float = 60.0):
    end = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
    return answer


def test_seed_worker_and_child_end_with_a_host_that_is_killed():
    host = subprocess.Popen([sys.executable, "-c", HOST], stderr=subprocess.DEVNULL)
    try:
        started = wait_for(lambda: len(below := children(host.pid)) == 3 and below)
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started), 20)


def test_the_time_limit_of_a_run_is_minutes_unless_told_otherwise():
    assert 60 <= TIMEOUT <= 600


# --- variants of the installed release


@pytest.mark.parametrize("delivery", ["file", "per-tensor", "runai", "shuffled:1", "shuffled:2", "shuffled:3"])
def test_the_fix_makes_every_delivery_whole(delivery):
    assert_whole(load(delivery=delivery, model_class="nvidia", variant="0.32.0+pr46168"))


def test_the_fix_does_not_change_what_a_sorted_load_gives():
    plain = load(delivery="sorted", model_class="nvidia").record["digests"]
    assert load(model_class="nvidia", variant="0.32.0+pr46168").record["digests"] == plain


def test_taking_the_fix_back_brings_the_bug_back_in_the_generic_class():
    assert_pair_lost(load(delivery="per-tensor", variant="0.32.0-pr46168"))
    assert_whole(load(delivery="sorted", variant="0.32.0-pr46168"))


# --- older releases: their Python on today's torch


@pytest.mark.parametrize("release, check", [
    ("0.25.1", assert_whole), ("0.24.0", assert_pair_lost), ("0.23.0", assert_pair_lost)])
def test_an_older_release_one_call_per_tensor(release, check):
    run = load(delivery="per-tensor", variant=release)
    check(run)
    assert run.record["environment"]["vllm"] == release
    assert any("torch" in note for note in run.record["environment"]["notes"])
    assert_whole(load(delivery="sorted", variant=release))


def test_a_matrix_computes_every_cell_and_says_why_one_can_not_be():
    releases = ["0.24.0", "0.23.0"]
    frame = ll.matrix(GLM, deliveries=["sorted", "per-tensor"], variants=releases, model_classes=[None, "nvidia"])
    columns = ["variant", "model_class", "delivery", "outcome", "broken", "lost", "uncovered"]
    assert frame[columns].fillna(-1).values.tolist() == [[release, *cell] for release in releases for cell in (
        ["generic", "sorted", "PASS", "", 0, 0], ["generic", "per-tensor", "FAIL", "L1 L2 L3", 6, 98304],
        ["nvidia", "sorted", "UNRESOLVED", "", -1, -1], ["nvidia", "per-tensor", "UNRESOLVED", "", -1, -1])]
    assert frame.why[0] == "" and frame.why[1].startswith("3 of ")
    assert frame.why[2] == ("vLLM 0.24.0 has no vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM; "
                            "choose another --model-class or another release")


def test_a_matrix_says_why_of_a_run_that_came_to_nothing():
    frame = ll.matrix(TINY, variants=["0.23.0"], timeout=0.1)
    assert frame.outcome[0] == "UNRESOLVED" and "did not end within 0.1 s" in frame.why[0]


def test_a_release_that_does_not_exist():
    assert_cannot_run(lambda: ll.run(TINY, variant="0.1.99"), "0.1.99")
