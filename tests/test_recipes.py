"""Recipes are the same bytes on every machine, laid out as safetensors does, and shaped as the models are."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loadlens import recipes
from loadlens.checkpoint import open_checkpoint
from loadlens.errors import CannotRun
from loadlens.recipes import RECIPES, build_recipe, recipe_sha256, table

README = Path(__file__).parent.parent / "data" / "README.md"


@pytest.fixture(scope="module", autouse=True)
def fresh_cache(tmp_path_factory):
    """Make every recipe anew: what an older version left in the user's cache proves nothing."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOADLENS_CACHE", str(cache))
        yield cache
    shutil.rmtree(cache)


@pytest.fixture(scope="module")
def glm():
    return load_file(build_recipe("glm-dsa-fp8") / "model.safetensors")


@pytest.fixture(scope="module")
def opt():
    return load_file(build_recipe("opt-125m") / "model.safetensors")


def test_data_readme_holds_the_table_that_the_generator_prints():
    assert table() in README.read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_files_hold_the_tensors_of_the_definition(name):
    checkpoint, recipe = open_checkpoint(f"recipe:{name}"), RECIPES[name]
    assert checkpoint.config == recipe.config
    assert checkpoint.state_dict_order == tuple(spec.name for spec in recipe.tensors)
    assert {(s.name, s.shape, s.dtype) for s in recipe.tensors} == {
        (t.name, t.shape, t.dtype) for t in checkpoint.tensors
    }


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_is_finite_and_no_element_is_all_ones(name):
    for tensor_name, tensor in load_file(build_recipe(name) / "model.safetensors").items():
        assert torch.isfinite(tensor.float()).all(), tensor_name
        assert not (tensor == 0).any(), tensor_name  # a zeroed element can be told from a loaded one
        raw = tensor.contiguous().view(torch.uint8).flatten()
        if tensor.element_size() == 1:
            assert not (raw == 0xFF).any(), tensor_name


def test_no_two_tensors_of_a_shape_are_alike(opt):
    biases = torch.stack([opt[name] for name in opt if name.endswith("_proj.bias")])
    assert len(torch.unique(biases, dim=0)) == len(biases) == 48


# --- glm-dsa-fp8 ---


def test_glm_file_is_laid_out_as_issue_46078_needs_it():
    checkpoint = open_checkpoint("recipe:glm-dsa-fp8")
    dtypes = [tensor.dtype for tensor in checkpoint.tensors]
    assert dtypes == ["F32"] * 5 + ["BF16"] * 77 + ["F8_E4M3"] * 3
    # lm_head stands between two runs of model.*: AutoWeightsLoader will split the call there
    assert checkpoint.names.index("lm_head.weight") == 5
    assert [name for name in checkpoint.names if not name.startswith("model.")] == ["lm_head.weight"]
    scales = [name for name in checkpoint.names if name.endswith("weight_scale_inv")]
    assert scales == [f"model.layers.{n}.self_attn.indexer.wk.weight_scale_inv" for n in range(3)]
    assert checkpoint.names[-3:] == tuple(name.removesuffix("_scale_inv") for name in scales)


def test_glm_wk_is_quantized_in_blocks_of_its_source(glm):
    specs = {spec.name: spec for spec in RECIPES["glm-dsa-fp8"].tensors}
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.indexer.wk.weight"
        source = recipes._draw(RECIPES["glm-dsa-fp8"].seed, specs[name]).bfloat16().float()
        weight, scale = glm[name].float(), glm[f"{name}_scale_inv"]
        amax = torch.stack([source[:, :128].abs().max(), source[:, 128:].abs().max()])
        assert torch.equal(scale, (amax / 448).reshape(1, 2))
        # each block uses the whole range of FP8, and 3 bits of mantissa are off by at most 1/16
        assert weight[:, :128].abs().max() == weight[:, 128:].abs().max() == 448
        restored = weight * scale.repeat_interleave(128, dim=1)
        error = (restored - source).abs()
        assert (error <= source.abs() / 16 + scale.max() * 2**-10).all()
        assert not torch.equal(restored, source)


def test_glm_names_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    recipe = RECIPES["glm-dsa-fp8"]
    config = transformers.AutoConfig.from_pretrained(build_recipe("glm-dsa-fp8"))
    assert config.topk_method == "noaux_tc" and config.qk_head_dim == 128 and config.dtype == torch.bfloat16
    with torch.device("meta"):
        model = transformers.GlmMoeDsaForCausalLM(config)
    theirs = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    ours = {spec.name: spec.shape for spec in recipe.tensors}
    # transformers 5 fuses the experts of a layer; the file has them one by one
    fused = {name: shape for name, shape in theirs.items() if ".experts." in name}
    assert fused["model.layers.1.mlp.experts.gate_up_proj"] == (4, 256, 256)
    assert ours["model.layers.1.mlp.experts.0.gate_proj.weight"] == (128, 256)
    only_ours = {name for name in ours if ".experts." in name or name.endswith("_scale_inv")}
    assert [n for n in theirs if n not in fused] == [n for n in ours if n not in only_ours]
    assert all(theirs[name] == ours[name] for name in ours.keys() - only_ours)


# --- opt-125m ---


def test_opt_names_shapes_and_order_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(build_recipe("opt-125m"))
    assert config.dtype == torch.float16
    with torch.device("meta"):
        model = transformers.OPTForCausalLM(config)
    theirs = [(name, tuple(value.shape)) for name, value in model.state_dict().items() if name != "lm_head.weight"]
    assert theirs == [(spec.name, spec.shape) for spec in RECIPES["opt-125m"].tensors]


def test_opt_has_the_sizes_of_the_assertion_in_49805(opt):
    prefix = "model.decoder.layers.0.self_attn"
    assert opt[f"{prefix}.k_proj.weight"].numel() == 589824
    order = open_checkpoint("recipe:opt-125m").state_dict_order
    start = order.index(f"{prefix}.k_proj.weight")
    assert [name.removeprefix(f"{prefix}.") for name in order[start : start + 6]] == [
        "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "q_proj.weight", "q_proj.bias",
    ]  # fmt: skip
    assert {tensor.dtype for tensor in opt.values()} == {torch.float16}
    assert "lm_head.weight" not in opt


# --- gpt2 and the controls ---

SMALL = {
    "gpt2": "GPT2LMHeadModel", "opt-tiny": "OPTForCausalLM", "qwen2-tiny": "Qwen2ForCausalLM",
    "llama-tiny": "LlamaForCausalLM",
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_small_names_shapes_and_order_are_those_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(build_recipe(name))
    assert config.architectures == [SMALL[name]]
    with torch.device("meta"):
        model = getattr(transformers, SMALL[name])(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    theirs = [(key, tuple(value.shape)) for key, value in model.state_dict().items() if key not in tied]
    assert theirs == [(spec.name, spec.shape) for spec in RECIPES[name].tensors]


def test_gpt2_has_one_tensor_for_q_k_and_v_and_its_weight_comes_first():
    order = open_checkpoint("recipe:gpt2").state_dict_order
    at = order.index("transformer.h.0.attn.c_attn.weight")
    assert order[at + 1] == "transformer.h.0.attn.c_attn.bias"
    assert {s.name: s.shape for s in RECIPES["gpt2"].tensors}[order[at]] == (256, 768)


@pytest.mark.parametrize(("name", "biased"), [
    ("opt-tiny", {"k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"}),
    ("qwen2-tiny", {"q_proj", "k_proj", "v_proj"}), ("llama-tiny", set()),
])  # fmt: skip
def test_controls_have_the_biases_that_they_are_controls_for(name, biased):
    names = [spec.name for spec in RECIPES[name].tensors if spec.name.endswith(".bias") and "norm" not in spec.name]
    assert {key.split(".")[-2] for key in names} == biased


# --- the cache ---


def test_a_recipe_is_made_once(monkeypatch):
    folder = build_recipe("glm-dsa-fp8")
    monkeypatch.setattr(recipes, "write_recipe", lambda *_: pytest.fail("made twice"))
    assert build_recipe("glm-dsa-fp8") == folder
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "state_dict.json"]


def test_a_changed_recipe_gets_a_folder_of_its_own(monkeypatch):
    recipe = RECIPES["glm-dsa-fp8"]
    folder, sha256 = build_recipe(recipe.name), recipe_sha256(build_recipe(recipe.name))
    monkeypatch.setitem(RECIPES, recipe.name, dataclasses.replace(recipe, seed=1))
    changed = build_recipe(recipe.name)
    assert changed != folder and recipe_sha256(changed) != sha256
    monkeypatch.setitem(RECIPES, recipe.name, dataclasses.replace(recipe, config=recipe.config | {"index_topk": 16}))
    assert json.loads((build_recipe(recipe.name) / "config.json").read_text())["index_topk"] == 16


def test_unknown_recipe_lists_the_known_ones():
    known = "glm-dsa-fp8, gpt2, llama-tiny, opt-125m, opt-tiny, qwen2-tiny"
    with pytest.raises(CannotRun, match=f"no recipe 'x'; the recipes are {known}"):
        build_recipe("x")


def test_a_cache_that_cannot_be_written_is_said_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOADLENS_CACHE", str(tmp_path / "file"))
    with pytest.raises(CannotRun, match="could not be written to the cache .*; set LOADLENS_CACHE"):
        build_recipe("glm-dsa-fp8")
