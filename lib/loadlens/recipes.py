"""Small checkpoints with the real layouts, made on the spot and the same on every machine.

    build_recipe("glm-dsa-fp8")  ->  <cache>/recipes/glm-dsa-fp8-<definition>/
        config.json          what AutoConfig reads
        model.safetensors    85 tensors: 5 F32, 77 BF16 (lm_head first), 3 F8_E4M3
        state_dict.json      the names in the order of the Hugging Face model's state dict

The values are noise. Raw bits of PCG64, seeded per tensor by its name, become odd multiples of a power of two; no
library function rounds on the way, so a recipe has one SHA-256 everywhere. `python -m loadlens.recipes` prints it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .cache import cache_dir, make_once
from .errors import CannotRun

if TYPE_CHECKING:
    import torch

__all__ = ["RECIPES", "Recipe", "TensorSpec", "build_recipe", "opt_tensors", "recipe_sha256", "table", "write_recipe"]

# Part of every recipe's definition: raise it when the way values are drawn changes.
GENERATOR = 1

# Role -> (centre, largest distance from it). Powers of two, so that drawing is exact in float32.
_RANGE = {"weight": (0.0, 2.0**-5), "bias": (0.0, 2.0**-4), "norm": (1.0, 2.0**-3), "block-fp8": (0.0, 2.0**-5)}
_TORCH_DTYPE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FP8_BLOCK = 128
_FP8_MAX = 448.0


class TensorSpec(NamedTuple):
    """One tensor of a recipe; `dtype` is a safetensors code, `role` says how its values are made."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    # weight, bias and norm are drawn; block-fp8 is drawn and quantized; block-scale is what that quantizing gave
    role: str


@dataclass(frozen=True)
class Recipe:
    """The full definition of a synthetic checkpoint."""

    # What stands after `recipe:`.
    name: str
    # One line for people.
    summary: str
    # Goes into the seed of every tensor.
    seed: int
    # Becomes config.json.
    config: dict[str, Any]
    # In the order in which the Hugging Face model's state dict lists them.
    tensors: tuple[TensorSpec, ...]

    @cached_property
    def definition(self) -> str:
        """Return 12 hex digits that change whenever the recipe's files would."""
        parts = [GENERATOR, self.seed, self.config, self.tensors]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def build_recipe(name: str) -> Path:
    """Return the folder of a recipe, making it in the cache on first use.

    Raises CannotRun for an unknown name and when the cache cannot be written.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise CannotRun(f"there is no recipe {name!r}; the recipes are {', '.join(sorted(RECIPES))}")
    try:
        folder = cache_dir("recipes") / f"{recipe.name}-{recipe.definition}"
        return make_once(folder, lambda draft: write_recipe(recipe, draft))
    except OSError as error:
        reason = error.strerror or error
        raise CannotRun(
            f"recipe {name} could not be written to the cache ({reason}); set LOADLENS_CACHE to a folder with room"
        ) from error


def recipe_sha256(folder: Path) -> str:
    """Return the SHA-256, in hex, of `model.safetensors` in a recipe's folder."""
    with open(folder / "model.safetensors", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def table() -> str:
    """Return the table of data/README.md, making every recipe that is not yet in the cache."""
    lines = [
        "| recipe | origin | seed | tensors | bytes | SHA-256 of model.safetensors |",
        "|---|---|---|---|---|---|",
    ]
    for name, recipe in sorted(RECIPES.items()):
        folder = build_recipe(name)
        size = (folder / "model.safetensors").stat().st_size
        lines.append(
            f"| `recipe:{name}` | synthetic, generator {GENERATOR} of `loadlens.recipes` | {recipe.seed} "
            f"| {len(recipe.tensors)} | {size} | `{recipe_sha256(folder)}` |"
        )
    return "\n".join(lines)


# --- making the files ---


def write_recipe(recipe: Recipe, folder: Path) -> None:
    """Write a recipe's config.json, model.safetensors and state_dict.json into a folder that exists."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        # safetensors itself lays the file out: by dtype, widest first, then by name.
        save_file(_make_tensors(recipe), folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from error
    (folder / "config.json").write_text(json.dumps(recipe.config, indent=2) + "\n")
    names = [spec.name for spec in recipe.tensors]
    (folder / "state_dict.json").write_text(json.dumps(names, indent=1) + "\n")


def _make_tensors(recipe: Recipe) -> dict[str, torch.Tensor]:
    import torch

    made: dict[str, torch.Tensor] = {}
    for spec in recipe.tensors:
        if spec.role == "block-scale":
            continue  # made together with the weight it belongs to
        values = _draw(recipe.seed, spec)
        if spec.role == "block-fp8":
            made[spec.name], made[f"{spec.name}_scale_inv"] = _quantize_blocks(values.bfloat16().float())
        else:
            made[spec.name] = values.to(getattr(torch, _TORCH_DTYPE[spec.dtype]))
    return made


def _draw(seed: int, spec: TensorSpec) -> torch.Tensor:
    """Draw a float32 tensor: uniform around the role's centre, never exactly the centre, exact in every step."""
    import numpy as np
    import torch

    centre, reach = _RANGE[spec.role]
    key = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
    numel = math.prod(spec.shape)
    # numpy promises the raw stream of a bit generator for ever; it does not promise Generator's distributions.
    raw = np.random.PCG64(int.from_bytes(key[:16], "little")).random_raw(-(-numel // 4))
    values = raw.astype("<u8", copy=False).view("<u2")[:numel].astype(np.float32)
    values *= 2.0
    values -= 65535.0  # the odd integers from -65535 to 65535
    values *= reach * 2.0**-16
    values += centre
    return torch.from_numpy(values.reshape(spec.shape))


def _quantize_blocks(source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize float32 [R, C] to FP8 [R, C] and scales [R / 128, C / 128]; the source is about weight * scale."""
    import torch

    rows, cols = (-(-size // _FP8_BLOCK) for size in source.shape)
    weight = torch.empty(source.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, cols, dtype=torch.float32)
    for row in range(rows):
        for col in range(cols):
            block = (
                slice(row * _FP8_BLOCK, (row + 1) * _FP8_BLOCK),
                slice(col * _FP8_BLOCK, (col + 1) * _FP8_BLOCK),
            )
            scale[row, col] = source[block].abs().max() / _FP8_MAX
            # The division may round to just above 448, which FP8 has no number for.
            scaled = (source[block] / scale[row, col]).clamp(-_FP8_MAX, _FP8_MAX)
            weight[block] = scaled.to(torch.float8_e4m3fn)
    return weight, scale


# --- GLM MoE DSA with a block-FP8 indexer.wk: the checkpoint of vllm#46078, three layers of it ---

_GLM: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 32,
    "indexer_rope_interleave": True,
    "indexer_types": ["full"] * 3,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "kv_lora_rank": 128,
    "layer_types": ["indexed_attention"] * 3,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 128,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "pad_token_id": None,
    "q_lora_rank": 128,
    "qk_head_dim": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    # transformers' GlmMoeDsaConfig has neither; vLLM makes the gate's bias only when it reads "noaux_tc".
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 64,
    "vocab_size": 512,
}


def _glm_tensors(c: dict[str, Any]) -> tuple[TensorSpec, ...]:
    hidden, heads, q_rank, kv_rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
    specs: list[TensorSpec] = []

    def add(name: str, *shape: int, role: str = "weight", dtype: str = "BF16") -> None:
        specs.append(TensorSpec(name, shape, dtype, role))

    def add_mlp(prefix: str, width: int) -> None:
        add(f"{prefix}.gate_proj.weight", width, hidden)
        add(f"{prefix}.up_proj.weight", width, hidden)
        add(f"{prefix}.down_proj.weight", hidden, width)

    add("model.embed_tokens.weight", c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        add(f"{attn}.q_a_proj.weight", q_rank, hidden)
        add(f"{attn}.q_a_layernorm.weight", q_rank, role="norm")
        add(f"{attn}.q_b_proj.weight", heads * c["qk_head_dim"], q_rank)
        add(f"{attn}.kv_a_proj_with_mqa.weight", kv_rank + c["qk_rope_head_dim"], hidden)
        add(f"{attn}.kv_a_layernorm.weight", kv_rank, role="norm")
        add(f"{attn}.kv_b_proj.weight", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), kv_rank)
        add(f"{attn}.o_proj.weight", hidden, heads * c["v_head_dim"])
        add(f"{attn}.indexer.wq_b.weight", index_heads * index_dim, q_rank)
        wk = f"{attn}.indexer.wk.weight"
        add(wk, index_dim, hidden, role="block-fp8", dtype="F8_E4M3")
        blocks = (-(-index_dim // _FP8_BLOCK), -(-hidden // _FP8_BLOCK))
        add(f"{wk}_scale_inv", *blocks, role="block-scale", dtype="F32")
        add(f"{attn}.indexer.k_norm.weight", index_dim, role="norm")
        add(f"{attn}.indexer.k_norm.bias", index_dim, role="bias")
        add(f"{attn}.indexer.weights_proj.weight", index_heads, hidden)
        if c["mlp_layer_types"][layer] == "dense":
            add_mlp(mlp, c["intermediate_size"])
        else:
            for expert in range(c["n_routed_experts"]):
                add_mlp(f"{mlp}.experts.{expert}", c["moe_intermediate_size"])
            add(f"{mlp}.gate.weight", c["n_routed_experts"], hidden)
            add(f"{mlp}.gate.e_score_correction_bias", c["n_routed_experts"], role="bias", dtype="F32")
            add_mlp(f"{mlp}.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"])
        add(f"model.layers.{layer}.input_layernorm.weight", hidden, role="norm")
        add(f"model.layers.{layer}.post_attention_layernorm.weight", hidden, role="norm")
    add("model.norm.weight", hidden, role="norm")
    add("lm_head.weight", c["vocab_size"], hidden)
    return tuple(specs)


# --- OPT-125m: its true configuration and shapes, for the assertion of vllm#49805 ---

_OPT: dict[str, Any] = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "dtype": "float16",
    "enable_bias": True,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layer_norm_elementwise_affine": True,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}


def opt_tensors(c: dict[str, Any]) -> tuple[TensorSpec, ...]:
    """Return the tensors of an OPT with this config, in state-dict order."""
    hidden, ffn = c["hidden_size"], c["ffn_dim"]
    specs: list[TensorSpec] = []

    def add(prefix: str, *shape: int, role: str = "weight", bias: bool = True) -> None:
        specs.append(TensorSpec(f"{prefix}.weight", shape, "F16", role))
        if bias:
            specs.append(TensorSpec(f"{prefix}.bias", shape[:1], "F16", "bias"))

    add("model.decoder.embed_tokens", c["vocab_size"], hidden, bias=False)
    # OPT keeps two more positions than it can use: its positions start at 2.
    add("model.decoder.embed_positions", c["max_position_embeddings"] + 2, hidden, bias=False)
    add("model.decoder.final_layer_norm", hidden, role="norm")
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.decoder.layers.{layer}"
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            add(f"{prefix}.self_attn.{projection}", hidden, hidden)
        add(f"{prefix}.self_attn_layer_norm", hidden, role="norm")
        add(f"{prefix}.fc1", ffn, hidden)
        add(f"{prefix}.fc2", hidden, ffn)
        add(f"{prefix}.final_layer_norm", hidden, role="norm")
    return tuple(specs)


# --- small models: the same loading code without OPT-125m's sizes, and the architectures that serve as controls ---

_OPT_TINY: dict[str, Any] = _OPT | {
    "ffn_dim": 512,
    "hidden_size": 128,
    "max_position_embeddings": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "word_embed_proj_dim": 128,
}

_GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "embd_pdrop": 0.1,
    "eos_token_id": 0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_embd": 256,
    "n_head": 4,
    "n_inner": None,
    "n_layer": 4,
    "n_positions": 256,
    "resid_pdrop": 0.1,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 512,
}

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 512,
}

_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 256,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 512,
}


def _gpt2_tensors(c: dict[str, Any]) -> tuple[TensorSpec, ...]:
    hidden = c["n_embd"]
    specs: list[TensorSpec] = []

    def add(prefix: str, *shape: int, role: str = "weight", bias: bool = True) -> None:
        specs.append(TensorSpec(f"{prefix}.weight", shape, "BF16", role))
        if bias:
            # Conv1D keeps its weight as [in, out], the transpose of a linear layer's
            specs.append(TensorSpec(f"{prefix}.bias", shape[-1:], "BF16", "bias"))

    add("transformer.wte", c["vocab_size"], hidden, bias=False)
    add("transformer.wpe", c["n_positions"], hidden, bias=False)
    for layer in range(c["n_layer"]):
        prefix = f"transformer.h.{layer}"
        add(f"{prefix}.ln_1", hidden, role="norm")
        add(f"{prefix}.attn.c_attn", hidden, 3 * hidden)
        add(f"{prefix}.attn.c_proj", hidden, hidden)
        add(f"{prefix}.ln_2", hidden, role="norm")
        add(f"{prefix}.mlp.c_fc", hidden, 4 * hidden)
        add(f"{prefix}.mlp.c_proj", 4 * hidden, hidden)
    add("transformer.ln_f", hidden, role="norm")
    return tuple(specs)


def _llama_tensors(c: dict[str, Any], qkv_bias: bool = False) -> tuple[TensorSpec, ...]:
    hidden, ffn = c["hidden_size"], c["intermediate_size"]
    head = hidden // c["num_attention_heads"]
    specs: list[TensorSpec] = []

    def add(prefix: str, *shape: int, role: str = "weight", bias: bool = False) -> None:
        specs.append(TensorSpec(f"{prefix}.weight", shape, "BF16", role))
        if bias:
            specs.append(TensorSpec(f"{prefix}.bias", shape[:1], "BF16", "bias"))

    add("model.embed_tokens", c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            add(f"{prefix}.self_attn.{name}_proj", c[heads] * head, hidden, bias=qkv_bias)
        add(f"{prefix}.self_attn.o_proj", hidden, hidden)
        add(f"{prefix}.mlp.gate_proj", ffn, hidden)
        add(f"{prefix}.mlp.up_proj", ffn, hidden)
        add(f"{prefix}.mlp.down_proj", hidden, ffn)
        add(f"{prefix}.input_layernorm", hidden, role="norm")
        add(f"{prefix}.post_attention_layernorm", hidden, role="norm")
    add("model.norm", hidden, role="norm")
    add("lm_head", c["vocab_size"], hidden)
    return tuple(specs)


# Name -> recipe: everything that can stand after `recipe:`.
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="glm-dsa-fp8",
            summary="GLM MoE DSA, 3 layers of hidden size 256, with a block-FP8 indexer.wk (vllm#46078)",
            seed=46078,
            config=_GLM,
            tensors=_glm_tensors(_GLM),
        ),
        Recipe(
            name="opt-125m",
            summary="OPT-125m in its true shapes, float16, biases not zero, tied embeddings (vllm#49805)",
            seed=49805,
            config=_OPT,
            tensors=opt_tensors(_OPT),
        ),
        Recipe(
            name="gpt2",
            summary="GPT-2 of 4 layers and hidden size 256: a fused c_attn, its weight before its bias (vllm#49805)",
            seed=49586,
            config=_GPT2,
            tensors=_gpt2_tensors(_GPT2),
        ),
        Recipe(
            name="opt-tiny",
            summary="OPT of 2 layers and hidden size 128, float16: a control with biased q, k, v and MLP",
            seed=1,
            config=_OPT_TINY,
            tensors=opt_tensors(_OPT_TINY),
        ),
        Recipe(
            name="qwen2-tiny",
            summary="Qwen2 of 2 layers and hidden size 256: a control with biased q, k, v",
            seed=2,
            config=_QWEN2,
            tensors=_llama_tensors(_QWEN2, qkv_bias=True),
        ),
        Recipe(
            name="llama-tiny",
            summary="Llama of 2 layers and hidden size 256: a control without biases",
            seed=3,
            config=_LLAMA,
            tensors=_llama_tensors(_LLAMA),
        ),
    )
}


if __name__ == "__main__":
    print(table())
