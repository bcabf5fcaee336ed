"""The reader agrees with safetensors on good files, and refuses bad ones in one sentence that names file and fault."""

import json
import os
import pickle
import random
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from loadlens.checkpoint import DTYPE_BITS, TensorInfo, open_checkpoint, read_header
from loadlens.errors import CannotRun

CONFIG = {"architectures": ["OPTForCausalLM"], "model_type": "opt"}
INDEX = "model.safetensors.index.json"


def entry(start, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def write_raw(file: Path, header: bytes | str | dict, data: int = 0, length: int | None = None) -> Path:
    """Write a safetensors file with any header at all, followed by `data` zero bytes."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + bytes(data))
    return file


@pytest.fixture
def folder(tmp_path):
    """A healthy checkpoint of two tensors, to be spoiled."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def write_index(folder: Path, weight_map) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_refused(act, *words: str) -> None:
    with pytest.raises(CannotRun) as caught:
        act()
    sentence = str(caught.value)
    for word in words:
        assert word in sentence
    assert "\n" not in sentence and len(sentence) < 700 and "; " in sentence


# --- good files ---


def assert_agrees_with_safetensors(file: Path) -> None:
    ours = read_header(file)
    with safe_open(file, framework="pt") as theirs:
        assert [tensor.name for tensor in ours] == theirs.offset_keys()
        for tensor in ours:
            piece = theirs.get_slice(tensor.name)
            assert (tensor.dtype, list(tensor.shape)) == (piece.get_dtype(), piece.get_shape())
            raw = theirs.get_tensor(tensor.name).contiguous().flatten().view(torch.uint8).numpy().tobytes()
            assert file.read_bytes()[tensor.start : tensor.end] == raw
            assert tensor.nbytes == len(raw)


def test_agrees_with_safetensors_on_a_recipe():
    assert_agrees_with_safetensors(open_checkpoint("recipe:glm-dsa-fp8").path / "model.safetensors")


def test_agrees_with_safetensors_on_every_torch_dtype_and_on_empty_tensors(tmp_path):
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float64, torch.bfloat16, torch.float8_e5m2]
    tensors = {f"t{i}": torch.arange(6).reshape(2, 3).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors |= {"empty": torch.zeros(0, 5), "empty2": torch.zeros(3, 0), "scalar": torch.tensor(1.5)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    ours = read_header(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as theirs:
        assert {t.name: t.shape for t in ours} == {n: tuple(theirs.get_slice(n).get_shape()) for n in theirs.keys()}
        assert {t.name: t.dtype for t in ours} == {n: theirs.get_slice(n).get_dtype() for n in theirs.keys()}
    assert next(t for t in ours if t.name == "scalar").numel == 1


def test_keys_of_an_entry_may_come_in_any_order_and_header_may_be_padded(tmp_path):
    file = write_raw(tmp_path / "x.safetensors", '{"a":{"data_offsets":[0,2],"shape":[1],"dtype":"F16"}}    ', 2)
    assert read_header(file) == [TensorInfo("a", "F16", (1,), "x.safetensors", 66, 68)]


def test_tensors_come_by_offset_whatever_the_header_order(tmp_path):
    write_raw(tmp_path / "x.safetensors", {"late": entry(4, 8), "early": entry(0, 4)}, 8)
    assert [t.name for t in read_header(tmp_path / "x.safetensors")] == ["early", "late"]


def test_four_bit_tensors_are_counted_in_bits(tmp_path):
    assert DTYPE_BITS["F4"] == 4
    assert read_header(write_raw(tmp_path / "x.safetensors", {"a": entry(0, 3, [6], "F4")}, 3))[0].numel == 6
    write_raw(tmp_path / "x.safetensors", {"a": entry(0, 3, [5], "F4")}, 3)
    assert_refused(lambda: read_header(tmp_path / "x.safetensors"), "not the size of F4 [5]")


def test_a_recipe_reads_as_a_checkpoint():
    checkpoint = open_checkpoint("recipe:glm-dsa-fp8")
    assert checkpoint.source == "recipe:glm-dsa-fp8"
    assert checkpoint.path.is_absolute()
    assert checkpoint.architecture == "GlmMoeDsaForCausalLM"
    assert checkpoint.files == ("model.safetensors",)
    assert len(checkpoint) == len(checkpoint.names) == 85
    assert checkpoint["model.layers.2.self_attn.indexer.wk.weight"].shape == (128, 256)
    assert "lm_head.weight" in checkpoint and "lm_head" not in checkpoint
    assert checkpoint.nbytes + checkpoint.tensors[0].start == os.path.getsize(checkpoint.path / "model.safetensors")
    assert checkpoint.state_dict_order[0] == "model.embed_tokens.weight"
    assert sorted(checkpoint.state_dict_order) == sorted(checkpoint.names)
    assert repr(checkpoint) == (
        "Checkpoint recipe:glm-dsa-fp8, GlmMoeDsaForCausalLM\n"
        "  85 tensors, 5.1 MB in 1 file: 5 F32, 77 BF16, 3 F8_E4M3\n"
        f"  identity {checkpoint.identity()[:12]}"
    )


def test_frame_has_a_row_per_tensor_in_file_order(folder):
    frame = open_checkpoint(folder).frame()
    assert list(frame.columns) == ["name", "dtype", "shape", "file", "start", "end", "numel", "nbytes"]
    assert frame[["name", "shape", "numel", "nbytes"]].values.tolist() == [["a", (2, 3), 6, 24], ["b", (4,), 4, 8]]


def test_identity_follows_config_and_headers_but_neither_place_nor_values(folder, tmp_path_factory):
    identity = open_checkpoint(folder).identity()
    other = tmp_path_factory.mktemp("other")
    (other / "config.json").write_text(json.dumps(CONFIG, indent=4))
    save_file({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.float16)}, other / "model.safetensors")
    assert open_checkpoint(other).identity() == identity
    (other / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 1}))
    assert open_checkpoint(other).identity() != identity
    (other / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.float16)}, other / "model.safetensors")
    assert open_checkpoint(other).identity() != identity


def test_without_an_index_every_safetensors_file_counts_in_sorted_order(folder):
    save_file({"c": torch.zeros(1)}, folder / "another.safetensors")
    (folder / "._model.safetensors").write_bytes(b"not ours")
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.files == ("another.safetensors", "model.safetensors")
    assert checkpoint.names == ("c", "a", "b")
    assert checkpoint.state_dict_order is None


def test_an_index_decides_which_files_belong(folder):
    save_file({"a": torch.zeros(9)}, folder / "older.safetensors")
    write_index(folder, {"a": "model.safetensors", "b": "model.safetensors"})
    assert open_checkpoint(folder).files == ("model.safetensors",)


def test_files_may_be_links_as_in_the_hugging_face_cache(folder, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "0123abcd"
    (folder / "model.safetensors").rename(blob)
    (folder / "model.safetensors").symlink_to(blob)
    assert open_checkpoint(folder).names == ("a", "b")


def test_reading_headers_imports_neither_torch_nor_vllm(folder):
    # A bare package stands in for `loadlens`, whose facade imports far more than this module does.
    program = """
import importlib.util, sys, types
package = types.ModuleType("loadlens")
package.__path__ = list(importlib.util.find_spec("loadlens").submodule_search_locations)
sys.modules["loadlens"] = package
from loadlens.checkpoint import open_checkpoint
assert len(open_checkpoint(sys.argv[1])) == 2
print([name for name in ("torch", "vllm", "numpy", "pandas", "pickle") if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# --- hostile headers; the last column says whether safetensors refuses the file as well ---

DEEP = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
HOSTILE_HEADERS = {
    "not JSON": ("{nope", 0, ["not a JSON object"], True),
    "an array": ("[]", 0, ["not a JSON object"], True),
    "leading space": (" {}", 0, ["not a JSON object"], False),
    "not UTF-8": (b'{"\xff":{}}', 0, ["not a JSON object"], True),
    "nested too deep": (DEEP, 0, ["not a JSON object"], True),
    "digits without end": ('{"a":' + "9" * 10_000 + "}", 0, ["not a JSON object"], True),
    "same tensor twice": (
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        1,
        ["lists 'a' twice"],
        False,
    ),
    "same key twice": ('{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1, ["key twice"], True),
    "entry is no object": ({"a": 1}, 0, ["not described by a JSON object"], True),
    "metadata is no object": ({"__metadata__": [], "a": entry(0, 1)}, 1, ["__metadata__"], True),
    "metadata is no string": ({"__metadata__": {"format": 1}, "a": entry(0, 1)}, 1, ["__metadata__"], True),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, 1, ["unknown dtype None"], True),
    "unknown dtype": ({"a": entry(0, 1, dtype="F7")}, 1, ["unknown dtype 'F7'"], True),
    "dtype is a list": ({"a": entry(0, 1, dtype=["U8"])}, 1, ["unknown dtype"], True),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, 1, ["no shape"], True),
    "negative size": ({"a": entry(0, 1, [-1, -1])}, 1, ["impossible size -1"], True),
    "fractional size": ({"a": entry(0, 1, [1.0])}, 1, ["impossible size 1.0"], True),
    "boolean size": ({"a": entry(0, 1, [True])}, 1, ["impossible size True"], True),
    "overflowing product": ({"a": entry(0, 0, [2**32, 2**32])}, 0, ["not the size of U8"], True),
    "overflowing size": ({"a": entry(0, 0, [0, 2**64])}, 0, ["impossible size"], True),
    "a thousand dimensions": ({"a": entry(0, 1, [1] * 1000)}, 1, ["1,000 dimensions"], False),
    "no offsets": ({"a": {"dtype": "U8", "shape": [1]}}, 1, ["data_offsets"], True),
    "one offset": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, 1, ["data_offsets"], True),
    "boolean offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, 1, ["offsets"], True),
    "negative offsets": ({"a": entry(-1, 0)}, 1, ["impossible data_offsets [-1, 0]"], True),
    "reversed offsets": ({"a": entry(1, 0, [1])}, 1, ["impossible data_offsets [1, 0]"], True),
    "past the end": ({"a": entry(0, 100)}, 99, ["1 bytes past the end"], True),
    "far past the end": ({"a": entry(0, 10**4000, [1])}, 9, ["more than 2^64 bytes past the end"], True),
    "wrong size": ({"a": entry(0, 4, [2, 3], "F32")}, 4, ["4 bytes", "not the size of F32 [2, 3]"], True),
    "overlap": ({"a": entry(0, 4), "b": entry(3, 6)}, 6, ["'b' overlaps tensor 'a'"], True),
    "two in one place": ({"a": entry(0, 4), "b": entry(0, 4)}, 4, ["overlaps"], True),
    "hole": ({"a": entry(0, 4), "b": entry(5, 6)}, 6, ["1 bytes before tensor 'b'"], True),
    "hole at the start": ({"a": entry(2, 4)}, 4, ["2 bytes before tensor 'a'"], True),
    "trailing bytes": ({"a": entry(0, 4)}, 7, ["3 bytes after the last tensor"], True),
    "empty name": ({"": entry(0, 1)}, 1, ["empty or longer"], False),
    "endless name": ({"a" * 10_001: entry(0, 1)}, 1, ["longer than 10,000 bytes"], False),
    "endless name in UTF-8": ({"\u00e9" * 5_001: entry(0, 1)}, 1, ["longer than 10,000 bytes"], False),
    "terminal escape in a name": ({"\x1b[2J": entry(0, 1)}, 1, ["cannot be printed"], False),
    "half a character in a name": ({"\ud800": entry(0, 1)}, 1, ["cannot be printed"], True),
}


@pytest.mark.parametrize("case", HOSTILE_HEADERS)
def test_hostile_header_is_refused(folder, case):
    header, data, words, safetensors_refuses = HOSTILE_HEADERS[case]
    file = write_raw(folder / "model.safetensors", header, data)
    assert_refused(lambda: open_checkpoint(folder), "model.safetensors", *words)
    if safetensors_refuses:
        with pytest.raises((SafetensorError, OverflowError)):
            safe_open(file, framework="pt").keys()


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100_000_001])
def test_header_length_over_the_cap_is_refused_before_it_is_read(tmp_path, length):
    file = write_raw(tmp_path / "x.safetensors", b"{}", length=length)
    os.truncate(file, 200_000_000)  # sparse: long enough for the last length to be true
    tracemalloc.start()
    assert_refused(lambda: read_header(file), "x.safetensors", f"header of {length} bytes")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 7])
def test_file_too_short_for_a_length_is_truncated(tmp_path, size):
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    assert_refused(lambda: read_header(tmp_path / "x.safetensors"), "truncated", f"{size} bytes")


def test_every_truncation_is_refused(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert_refused(lambda: open_checkpoint(folder), "model.safetensors")


def test_random_damage_to_a_header_gives_an_answer_or_a_sentence(folder):
    file = folder / "model.safetensors"
    whole, rng = file.read_bytes(), random.Random(0)
    refused = 0
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(whole) - 32)] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            read_header(file)
        except CannotRun:
            refused += 1
        else:  # what we accept safetensors accepts
            safe_open(file, framework="pt").keys()
    assert refused > 1000


def test_a_header_of_countless_small_values_is_refused_before_it_is_decoded(tmp_path):
    file = write_raw(tmp_path / "x.safetensors", '{"a":[' + "[]," * 4_002_000 + "[]]}")
    assert_refused(lambda: read_header(file), "more than 2,000,000 tensors")


# --- the folder ---


def test_missing_folder(tmp_path):
    assert_refused(lambda: open_checkpoint(tmp_path / "nowhere"), "no folder", "nowhere", "recipe:NAME")
    assert_refused(lambda: open_checkpoint("x" * 500), "no folder")


def test_unknown_recipe_names_the_known_ones():
    assert_refused(lambda: open_checkpoint("recipe:nope"), "no recipe 'nope'", "glm-dsa-fp8", "opt-125m")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "has no config.json"),
        ("{", "config.json: it is not JSON"),
        ("[" * 100_000, "config.json: it is not JSON"),
        ("[]", "config.json: it is not a JSON object"),
        ("{}", "no list of architectures"),
        ('{"architectures": []}', "no list of architectures"),
        ('{"architectures": "OPTForCausalLM"}', "no list of architectures"),
        ('{"architectures": [1]}', "no list of architectures"),
    ],
)
def test_bad_config(folder, content, fault):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert_refused(lambda: open_checkpoint(folder), fault)


def test_pickled_weights_are_named_and_never_opened(folder, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert_refused(lambda: open_checkpoint(folder), "no *.safetensors", "never unpickled")
    assert not (tmp_path / "exploded").exists()


def test_files_without_a_tensor(folder):
    write_raw(folder / "model.safetensors", "{}")
    assert_refused(lambda: open_checkpoint(folder), "hold no tensor")


def test_the_same_tensor_in_two_files(folder):
    save_file({"b": torch.zeros(1)}, folder / "second.safetensors")
    assert_refused(lambda: open_checkpoint(folder), "second.safetensors", "'b' is also in model.safetensors")


def test_a_pipe_or_a_folder_in_place_of_a_file_is_not_waited_for(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    assert_refused(lambda: open_checkpoint(folder), "model.safetensors: it is not a regular file")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert_refused(lambda: open_checkpoint(folder), "model.safetensors: it is not a regular file")
    (folder / "model.safetensors").rmdir()
    (folder / "model.safetensors").symlink_to("gone")
    assert_refused(lambda: open_checkpoint(folder), "model.safetensors: it cannot be read")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        (None, ["no weight_map"]),
        ({}, ["no weight_map"]),
        (["a"], ["no weight_map"]),
        ({"a": "/etc/model.safetensors"}, ["outside its folder"]),
        ({"a": "../model.safetensors"}, ["outside its folder"]),
        ({"a": "x/../../model.safetensors"}, ["outside its folder"]),
        ({"a": "pytorch_model.bin"}, ["not a safetensors file"]),
        ({"a": 5}, ["not a safetensors file"]),
        ({"a": "gone.safetensors"}, ["gone.safetensors", "missing"]),
        ({"a": "x\x00.safetensors"}, ["missing"]),
        ({"a": "x" * 5000 + ".safetensors"}, ["missing"]),
        ({"a": "model.safetensors", "c": "model.safetensors"}, ["'c' is not in model.safetensors"]),
        ({"a": "model.safetensors", "b": "second.safetensors"}, ["'b' is not in second.safetensors"]),
        ({"a": "model.safetensors", "b": "./model.safetensors"}, ["is also in ./model.safetensors"]),
    ],
)
def test_bad_index(folder, weight_map, words):
    save_file({"d": torch.zeros(1)}, folder / "second.safetensors")
    write_index(folder, weight_map)
    assert_refused(lambda: open_checkpoint(folder), *words)


def test_index_that_is_not_json(folder):
    (folder / INDEX).write_text("{")
    assert_refused(lambda: open_checkpoint(folder), f"{INDEX}: it is not JSON")


@pytest.mark.parametrize("order", [{}, ["a"], ["a", "a"], ["a", "c"], ["a", 1], ["a", "b", "b"]])
def test_state_dict_order_must_list_exactly_the_tensors(folder, order):
    (folder / "state_dict.json").write_text(json.dumps(["b", "a"]))
    assert open_checkpoint(folder).state_dict_order == ("b", "a")
    (folder / "state_dict.json").write_text(json.dumps(order))
    assert_refused(lambda: open_checkpoint(folder), "state_dict.json", "exactly the checkpoint's tensor names")
