"""The command line: exit status, one line for what could not run, and one JSON object when asked."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import loadlens as ll
from loadlens.__main__ import main
from loadlens.delivery import GRAMMAR

GLM, TINY = "recipe:glm-dsa-fp8", "recipe:opt-tiny"
V2 = "model_executor/models/deepseek_v2.py"


@pytest.fixture
def loadlens(capsys, workers):
    """Run the command line in this process, where the workers are warm; return (exit status, stdout, stderr)."""

    def call(*arguments):
        status = main([str(a) for a in arguments])
        return status, *capsys.readouterr()

    return call


def in_a_process(*arguments, **options):
    command = [sys.executable, "-m", "loadlens", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def assert_one_line(result, *words: str) -> None:
    """Status 2, nothing on stdout, one sentence on stderr (after a word on a download that was tried)."""
    status, out, err = result
    err = re.sub(r"^loadlens: asking pip for .* \.\.\.\n", "", err)
    assert (status, out) == (2, ""), result
    assert re.fullmatch(r"loadlens: [^\n]+\n", err) and "Traceback" not in err, err
    assert all(word in err for word in words), err


# --- check


def test_check_exits_0_when_all_laws_hold(loadlens):
    status, out, err = loadlens("check", GLM, "--model-class", "nvidia", "--delivery", "sorted")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "PASS  recipe:glm-dsa-fp8 · sorted · vLLM 0.32.0 · nvidia · cpu"


def test_check_exits_1_and_shows_the_verdict_the_laws_the_lost_tensors_and_the_hole(loadlens):
    status, out, err = loadlens("check", GLM, "--model-class", "nvidia", "--delivery", "file")
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == "FAIL  recipe:glm-dsa-fp8 · file · vLLM 0.32.0 · nvidia · cpu"
    assert [line.split()[:2] for line in lines[2:7]] == [
        ["L1", "FAIL"], ["L2", "FAIL"], ["L3", "FAIL"], ["L4", "UNRESOLVED"], ["L5", "UNRESOLVED"]]
    assert "lost tensors (6 of 85)" in lines
    hole = "  model.layers.{0..2}.self_attn.indexer.wk_weights_proj.weight (x3): 32,768 of 33,792 each, never written"
    assert hole in lines


def test_check_prints_one_json_object(loadlens):
    status, out, err = loadlens("check", GLM, "--model-class", "nvidia", "--delivery", "file", "--json")
    value = json.loads(out)
    assert (status, err, out.count("\n")) == (1, "", 1)
    assert value.keys() >= {"schema", "checkpoint", "delivery", "variant", "model_class", "outcome", "laws", "lost",
                            "uncovered", "calls", "triggers", "tensors", "seconds"}
    assert value["laws"].keys() == {"L1", "L2", "L3", "L4", "L5"} and value["outcome"] == "FAIL"
    assert len(value["lost"]) == 6 and value["tensors"] == 85 and len(value["calls"]) == 3
    assert [u["elements"] for u in value["uncovered"]] == [32768] * 3
    assert value["uncovered"][0].keys() == {"parameter", "elements", "of"}


def test_check_takes_two_rounds(loadlens):
    status, out, _ = loadlens("check", TINY, "--rounds", 2, "--json")
    assert status == 0 and json.loads(out)["laws"]["L5"]["outcome"] == "PASS"


def test_check_over_its_time_limit_exits_2_and_says_why_in_one_line(loadlens):
    status, out, err = loadlens("check", "recipe:opt-125m", "--timeout", 0.1)
    assert status == 2 and out.startswith("UNRESOLVED  recipe:opt-125m")
    assert err == ("loadlens: UNRESOLVED: the load could not be judged: it did not end within 0.1 s and was stopped; "
                   "give it a larger --timeout, or look at where it hangs\n")


def test_check_of_a_load_that_raises_exits_2_with_the_exception(loadlens, folder):
    save_file({"model.decoder.nothing": torch.ones(2)}, folder / "model.safetensors")
    status, out, err = loadlens("check", folder, "--json")
    assert status == 2 and json.loads(out)["error"]["type"] in err and err.count("\n") == 1
    assert err.startswith("loadlens: UNRESOLVED: the load did not finish: ")


# --- bad input: one sentence, status 2, nothing on stdout


@pytest.fixture
def folder(tmp_path):
    """A healthy checkpoint of a tiny OPT, to be spoiled."""
    source = ll.open_checkpoint(TINY).path
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    return tmp_path


def safetensors(file: Path, header: dict | bytes, data: int = 0, length: int | None = None) -> None:
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + bytes(data))


def truncated_header(folder):
    safetensors(folder / "model.safetensors", b'{"a"', length=1000)
    return "model.safetensors", "truncated"


def header_of_2_to_the_60(folder):
    safetensors(folder / "model.safetensors", b"{}", length=2**60)
    return "model.safetensors", str(2**60)


def overlapping_offsets(folder):
    entries = {n: dict(dtype="U8", shape=[4], data_offsets=at) for n, at in (("a", [0, 4]), ("b", [2, 6]))}
    safetensors(folder / "model.safetensors", entries, 6)
    return "tensor 'b' overlaps tensor 'a'",


def index_outside_of_its_folder(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    return "'../other.safetensors', which is outside its folder",


def missing_config(folder):
    (folder / "config.json").unlink()
    return "it has no config.json",


def config_that_is_no_json(folder):
    (folder / "config.json").write_text("{")
    return "config.json: it is not JSON",


def unknown_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchForCausalLM"]}))
    return "NoSuchForCausalLM", "vLLM 0.32.0"


def no_weights(folder):
    (folder / "model.safetensors").unlink()
    return "no *.safetensors file",


@pytest.mark.parametrize("spoil", [
    truncated_header, header_of_2_to_the_60, overlapping_offsets, index_outside_of_its_folder, missing_config,
    config_that_is_no_json, unknown_architecture, no_weights])
def test_a_checkpoint_that_can_not_be_read(loadlens, folder, spoil):
    words = spoil(folder)
    assert_one_line(loadlens("check", folder), *words)
    assert_one_line(loadlens("check", folder, "--json"), *words)


@pytest.mark.parametrize("arguments, words", [
    (["check", "recipe:none"], ["there is no recipe 'none'; the recipes are", "glm-dsa-fp8"]),
    (["check", "no/such/folder"], ["there is no folder 'no/such/folder'"]),
    (["check", TINY, "--delivery", "alphabetic"], [f"there is no delivery 'alphabetic'; choose {GRAMMAR}"]),
    (["check", TINY, "--delivery", "shuffled:x"], ["whole number"]),
    (["check", TINY, "--delivery", "split:x"], ["no tensor 'x' to split after"]),
    (["check", TINY, "--variant", "0.32.0+pr1"], ["unknown fix 'pr1'", "pr46168"]),
    (["check", TINY, "--variant", "newest"], ["'newest'", "RELEASE([+-]FIX)*"]),
    (["check", TINY, "--variant", "0.1.99"], ["0.1.99"]),
    (["check", TINY, "--model-class", "intel"], ["no model class 'intel'"]),
    (["check", TINY, "--quantization", "nothing"], ["vLLM 0.32.0 refuses"]),
    (["check", TINY, "--device", "tpu"], ["--device", "cpu", "`loadlens check --help`"]),
    (["check", TINY, "--rounds", "0"], ["--rounds and --timeout take finite numbers above zero"]),
    (["check", TINY, "--rounds", "two"], ["--rounds", "'two'"]),
    (["check", TINY, "--timeout", "-1"], ["finite numbers above zero"]),
    (["check", TINY, "--timeout", "nan"], ["finite numbers above zero"]),
    (["check", TINY, "--timeout", "inf"], ["finite numbers above zero"]),
    (["check"], ["CHECKPOINT"]),
    (["check", TINY, "--wrong"], ["--wrong", "--help`"]),
    (["diff", "pr1"], ["unknown fix 'pr1'"]),
    (["diff", "pr46168", "--variant", "9"], ["RELEASE"]),
    (["diff", "pr46168", "--variant", "0.1.99"], ["0.1.99"]),
    (["fixes", "--variant", "0.1.99"], ["0.1.99"]),
    (["fix"], ["'fix'"]),
    ([], ["COMMAND"]),
])
def test_bad_input_is_one_sentence(loadlens, arguments, words):
    assert_one_line(loadlens(*arguments), *words)


# --- fixes, diff, doctor


def test_fixes_lists_every_fix_with_its_state_and_line(loadlens):
    status, out, err = loadlens("fixes")
    assert (status, err) == (0, "")
    for fix in ll.FIXES.values():
        assert f"{fix.name}  {fix.title}" in out.splitlines()
    assert re.search(rf"^  present +{re.escape(V2)}:\d+ +DeepseekV2Model.load_weights$", out, re.M)
    assert re.search(r"^  absent +models/deepseek_v32/nvidia/model\.py:\d+ +DeepseekV32Model.load_weights$", out, re.M)
    older = loadlens("fixes", "--variant", "0.24.0")[1]
    assert re.search(rf"^  absent +{re.escape(V2)}:\d+ ", older, re.M)
    assert re.search(r"^  not applicable +models/deepseek_v32/nvidia/model\.py +no such file in this release$",
                     older, re.M)


def test_a_diff_shows_what_a_fix_changes_and_what_taking_it_back_does(loadlens):
    status, applied, err = loadlens("diff", "pr46168")
    assert (status, err) == (0, "")
    assert "+++ b/vllm/models/deepseek_v32/nvidia/model.py" in applied
    assert '+        if _pending_wk_fp8 is None:\n' in applied
    status, back, _ = loadlens("diff", "pr46168", "--revert")
    assert status == 0 and f"--- a/vllm/{V2}" in back and "-        if _pending_wk_fp8 is None:\n" in back
    assert "nvidia" not in back  # there is nothing to take back there


@pytest.mark.parametrize("arguments", [["diff", "pr46168", "--variant", "0.32.0+pr46168"],
                                       ["diff", "pr46168", "--variant", "0.32.0-pr46168", "--revert"]])
def test_a_diff_that_has_nothing_to_do_says_so(loadlens, arguments):
    assert_one_line(loadlens(*arguments), "pr46168")


def test_doctor_examines_this_machine():
    done = in_a_process("doctor")
    lines = {line[6:28].strip(): line[28:].strip() for line in done.stdout.splitlines()}
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.startswith("ok    ") for line in done.stdout.splitlines())
    assert re.fullmatch(r"vllm(-cpu)? 0\.32\.0\S*", lines["vllm"])
    assert lines["a run"].startswith("recipe:glm-dsa-fp8: PASS in ")


# --- as a process


def test_help_names_the_commands_and_exits_0():
    done = in_a_process("--help")
    assert done.returncode == 0 and not done.stderr
    assert all(f"\n    {command} " in done.stdout for command in ("check", "fixes", "diff", "doctor"))


def test_a_process_exits_with_the_status_and_prints_one_line():
    done = in_a_process("check", "recipe:none")
    assert_one_line((done.returncode, done.stdout, done.stderr), "there is no recipe 'none'")


def test_a_process_exits_1_for_a_broken_law_and_leaves_no_worker():
    done = in_a_process("check", GLM, "--model-class", "nvidia", "--delivery", "file", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    assert len(json.loads(done.stdout)["lost"]) == 6
    workers = [c for c in Path("/proc").glob("[0-9]*/cmdline") if b"loadlens.inside.worker" in _read(c)]
    assert all(_parent(c.parent) == os.getpid() for c in workers if _parent(c.parent) in (1, os.getpid()))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _parent(process: Path) -> int:
    found = re.search(rb"PPid:\s*(\d+)", _read(process / "status"))
    return int(found[1]) if found else -1


@pytest.mark.parametrize("command", ["fixes", "diff pr46168", "--help"])
def test_a_reader_that_stops_early_is_no_error(command):
    line = f"{sys.executable} -m loadlens {command} | head -c 1; echo status ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout[1:] == "status 0\n"


def test_importing_the_library_starts_nothing_and_prints_nothing():
    code = "import sys, loadlens, threading; print('vllm' in sys.modules, threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False 1\n", "")
