"""The plain torch stand-ins for Marlin's CUDA operations do what vLLM's own Python expects of them.

vLLM is imported once, by this file run as a script: it packs layers with vLLM's Marlin code, keeps what vLLM's own
reference packer makes of them, and generates with a tiny OPT. The tests judge what it wrote.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loadlens.inside import marlin

# (k, n) of a weight; the last three are no Marlin tiles, and vLLM pads them with zeros
SHAPES = [(64, 128), (128, 64), (256, 384), (768, 192), (80, 96), (200, 72), (36, 500)]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# one rounding to 16 bits at the end: half a unit in the last place of 8 or 11 bits, relative to the result
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
PROMPT = [2, *range(5, 36)]


# --- run as a script, in a process with vLLM


def _layers(tensors: dict[str, torch.Tensor]) -> None:
    """Quantize, pack and multiply with vLLM's own Python; keep every tensor on the way."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights

    for (k, n), (label, dtype), blocks in [
        *(((k, n), item, False) for k, n in SHAPES for item in DTYPES.items()),
        ((256, 384), ("bf16", torch.bfloat16), True),
    ]:  # fmt: skip
        w, x, bias = torch.randn(n, k, dtype=dtype) / 16, torch.randn(5, k, dtype=dtype), torch.randn(n, dtype=dtype)
        w *= torch.linspace(0.5, 2, n, dtype=dtype)[:, None]  # so that every channel has a scale of its own
        layer = torch.nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition, layer.orig_dtype = n, k, dtype
        if blocks:
            scale = w.float().reshape(n // 128, 128, k // 128, 128).abs().amax((1, 3)) / 448  # [n / 128, k / 128]
            layer.weight_block_size = [128, 128]
        else:
            scale = w.float().abs().amax(1, keepdim=True) / 448  # [n, 1]
        scale = scale.to(dtype).float()  # Marlin keeps scales in 16 bits; that loss is not what is measured
        q, _ = ops.scaled_fp8_quant(w, scale=scale)
        layer.register_parameter("weight", torch.nn.Parameter(q if blocks else q.t(), requires_grad=False))
        name = "weight_scale_inv" if blocks else "weight_scale"
        layer.register_parameter(name, torch.nn.Parameter(scale, requires_grad=False))
        layer.register_parameter("bias", torch.nn.Parameter(bias.clone(), requires_grad=False))
        marlin_utils_fp8.prepare_fp8_layer_for_marlin(layer, size_k_first=not blocks)
        pk, pn = layer.weight.shape[0] * 16, layer.weight.shape[1] // 4
        padded = torch.zeros(pk, pn, dtype=torch.int32)
        padded[:k, :n] = q.t().view(torch.uint8).int()
        kept = dict(q=q, scale=scale, bias=bias, x=x, packed=layer.weight, packed_scales=getattr(layer, name),
                    packed_bias=layer.bias, reference=marlin_weights(padded, pk, pn, 8, get_weight_perm(8)))
        for out, b in (("y", None), ("y_bias", layer.bias)):
            kept[out] = marlin_utils_fp8.apply_fp8_marlin_linear(x, layer.weight, getattr(layer, name), None, n, k, b)
        key = f"{k}x{n} {label}{' blocks' if blocks else ''}"
        tensors |= {f"{key} {part}": t.detach().clone().contiguous() for part, t in kept.items()}


def _opt(folder: Path, rounded: Path) -> None:
    """Write an OPT of 2 layers with biases that matter and logits that are not flat; and it with rounded weights.

    Rounded to what FP8 with one scale for each of vLLM's layers can hold (q, k and v are one layer), as bfloat16.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=512, hidden_size=128, word_embed_proj_dim=128, ffn_dim=256, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config)
    for name, p in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(p, std=0.3 if "embed" in name or name.endswith("bias") else 0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    for layer in model.model.decoder.layers:
        attention = layer.self_attn
        qkv = attention.q_proj, attention.k_proj, attention.v_proj
        for fused in qkv, (attention.out_proj,), (layer.fc1,), (layer.fc2,):
            scale = torch.cat([part.weight for part in fused]).float().abs().max().reshape(1) / 448
            for part in fused:
                q, _ = marlin.fp8_quantize(part.weight.detach(), scale)
                part.weight.data = (q.float() * scale.bfloat16()).bfloat16()
    model.save_pretrained(rounded)


def _logprobs(folder: Path, quantization: str | None, mutant: str | None = None) -> list[float]:
    """Return the log-probability of every prompt token but the first, from a real vLLM engine in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            from vllm import LLM, SamplingParams

            options = {}
            if quantization == "fp8":
                marlin.install()
                options = marlin.options()
            if mutant:
                MUTANTS[mutant](lambda name, value: setattr(marlin, name, value))
            llm = LLM(str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=128, enforce_eager=True,
                      quantization=quantization, kv_cache_memory_bytes=16 << 20, disable_log_stats=True, **options)
            sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=0)
            answer = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0]
            values = [answer.prompt_logprobs[i][t].logprob for i, t in enumerate(PROMPT) if i]
            os.write(write, json.dumps(values).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def _on_cuda() -> list[str]:
    """Install as if this platform were CUDA."""
    from vllm.platforms import current_platform

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "is_cuda", lambda self: True)
        return marlin.install()


def collect(out: Path) -> None:
    """Write everything that the tests look at into the folder `out`."""
    import vllm._custom_ops as ops
    import vllm.entrypoints.llm  # noqa: F401
    import vllm.model_executor.layers.quantization.online.fp8  # noqa: F401
    import vllm.v1.engine.llm_engine  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401

    from loadlens.inside.build import import_architecture

    import_architecture("OPTForCausalLM")  # all of this so that a child starts warm
    torch.set_num_threads(1)
    facts, tensors = {}, {}
    opt, rounded = out / "opt", out / "rounded"
    _opt(opt, rounded)
    facts["logprobs"] = {
        "bfloat16": _logprobs(opt, None), "rounded": _logprobs(rounded, None),
        "per channel": _logprobs(opt, "fp8_per_channel"), "marlin": _logprobs(opt, "fp8"),
        "mutant": _logprobs(opt, "fp8", "scale order"),
    }  # fmt: skip
    facts["on cuda"] = _on_cuda(), hasattr(torch.ops._C, "gptq_marlin_repack")
    facts["notes"], facts["again"] = marlin.install(), marlin.install()
    with torch.no_grad():
        _layers(tensors)
    try:
        ops.gptq_marlin_repack(torch.zeros(8, 64, dtype=torch.int32), 64, 64, 4)
    except NotImplementedError as error:
        facts["4 bits"] = str(error)
    for name, arguments in {"per tensor": {}, "per token": {"use_per_token_if_dynamic": True}}.items():
        x = torch.randn(7, 96)
        q, scale = ops.scaled_fp8_quant(x, num_token_padding=None, **arguments)
        tensors |= {f"dynamic {name} x": x, f"dynamic {name} q": q, f"dynamic {name} scale": scale}
    save_file(tensors, out / "layers.safetensors")
    (out / "facts.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    out = tmp_path_factory.mktemp("marlin")
    env = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    env |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_TARGET_DEVICE="cpu",
                VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1", VLLM_CACHE_ROOT=str(out))
    done = subprocess.run([sys.executable, __file__, str(out)], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((out / "facts.json").read_text()), load_file(out / "layers.safetensors")


# --- mutants: what the checks below must notice


def _forget_exponent(put):
    put("FUSED_EXPONENT_BIAS", dict.fromkeys(marlin.FUSED_EXPONENT_BIAS, 1.0))


def _forget_scale_order(put):
    put("_scale_order", lambda groups, device: torch.arange(64 if groups > 1 else 32))


def _wrong_weight_order(put):
    right = marlin._weight_order(torch.device("cpu"))
    put("_weight_order", lambda device: right.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1))  # rows 0, 1, 8, 9


MUTANTS = {"exponent": _forget_exponent, "scale order": _forget_scale_order, "weight order": _wrong_weight_order}


@pytest.fixture
def mutate(monkeypatch):
    return lambda mutant: MUTANTS[mutant](lambda name, value: monkeypatch.setattr(marlin, name, value))


# --- the layout


def _gptq(w: torch.Tensor) -> torch.Tensor:
    """Pack bytes [k, n] into int32 [k / 4, n], four consecutive k in each."""
    return w.t().contiguous().view(torch.int32).t().contiguous()


@pytest.mark.parametrize("k, n", [(16, 64), (64, 128), (128, 64), (256, 384), (768, 2304), (48, 192)])
def test_repacking_is_undone_exactly(k, n):
    w = torch.randint(0, 256, (k, n), dtype=torch.uint8)
    packed = marlin.marlin_repack(_gptq(w), k, n)
    assert packed.dtype is torch.int32 and packed.shape == (k // 16, n * 4)
    assert torch.equal(marlin.marlin_unpack(packed, k, n).view(torch.uint8), w)
    assert not torch.equal(packed.view(torch.uint8).reshape(k, n), w)


@pytest.mark.parametrize("k, n", SHAPES)
def test_packing_is_that_of_vllms_reference(collected, k, n):
    _, tensors = collected
    for label in DTYPES:
        packed, reference = tensors[f"{k}x{n} {label} packed"], tensors[f"{k}x{n} {label} reference"]
        assert torch.equal(packed, reference)
        q = tensors[f"{k}x{n} {label} q"]
        unpacked = marlin.marlin_unpack(packed, packed.shape[0] * 16, packed.shape[1] // 4)
        assert torch.equal(unpacked[:k, :n].view(torch.uint8), q.t().view(torch.uint8))
        assert not unpacked[k:].float().any() and not unpacked[:, n:].float().any()  # vLLM's padding


def test_a_wrong_order_is_not_that_of_vllms_reference(collected, mutate):
    _, tensors = collected
    mutate("weight order")
    padded = tensors["256x384 bf16 q"].t().view(torch.uint8).contiguous()
    packed = marlin.marlin_repack(_gptq(padded), 256, 384)
    assert not torch.equal(packed, tensors["256x384 bf16 reference"])
    # it comes back from its own inverse, which is why a round trip alone proves nothing
    assert torch.equal(marlin.marlin_unpack(packed, 256, 384).view(torch.uint8), padded)


def test_what_marlin_cannot_pack_is_refused():
    with pytest.raises(ValueError, match="k a multiple of 16 and n of 64"):
        marlin.marlin_repack(torch.zeros(4, 32, dtype=torch.int32), 16, 32)


# --- the product


def _expected(tensors: dict[str, torch.Tensor], key: str, bias: bool) -> torch.Tensor:
    """The dequantized product in float32."""
    q, scale, x = (tensors[f"{key} {part}"].float() for part in ("q", "scale", "x"))
    rows, columns = q.shape[0] // scale.shape[0], q.shape[1] // scale.shape[1]
    w = q * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)  # [n, k]
    return x @ w.t() + (tensors[f"{key} bias"].float() if bias else 0)


def _off(tensors: dict[str, torch.Tensor], key: str, y: torch.Tensor, bias: bool) -> float:
    """The largest distance from the float32 product, in units of the one rounding that is allowed."""
    expected = _expected(tensors, key, bias)
    allowed = ROUNDING[y.dtype] * expected.abs() + 1e-5  # float32 sums taken in another order
    return ((y.float() - expected).abs() / allowed).nan_to_num(torch.inf).max().item()


KEYS = [*(f"{k}x{n} {label}" for k, n in SHAPES for label in DTYPES), "256x384 bf16 blocks"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("key", KEYS)
def test_vllms_linear_is_the_dequantized_product(collected, key, bias):
    _, tensors = collected
    y = tensors[f"{key} y_bias" if bias else f"{key} y"]
    assert y.dtype is DTYPES[key.split()[1]]
    assert _off(tensors, key, y, bias) <= 1


def _gemm(tensors: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    packed, x = tensors[f"{key} packed"], tensors[f"{key} x"]
    return marlin.marlin_gemm(x, packed, tensors[f"{key} packed_scales"], tensors[f"{key} packed_bias"], 384, 256)


@pytest.mark.parametrize("key", ["256x384 bf16", "256x384 fp16", "256x384 bf16 blocks"])
@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_a_mutant_of_the_product_is_noticed(collected, mutate, key, mutant):
    _, tensors = collected
    if mutant is None:
        assert _off(tensors, key, _gemm(tensors, key), bias=True) <= 1
    else:
        mutate(mutant)
        assert _off(tensors, key, _gemm(tensors, key), bias=True) > 20


# --- quantization


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """FP8 by definition: of all finite numbers of the format the nearest, and of two as near the even one."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).double()
    codes, numbers = codes[numbers.isfinite()], numbers[numbers.isfinite()]
    distance = (x.double().reshape(-1, 1) - numbers).abs() + (codes % 2) * 1e-12
    return codes[distance.argmin(1)].reshape(x.shape).view(torch.float8_e4m3fn)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.float(), b.float())  # as numbers: zero has two codes


def test_quantization_takes_the_nearest_number():
    ties = torch.arange(-512, 512.0).reshape(16, 64) / 16
    x = torch.cat([torch.randn(32, 64) * 100, torch.randn(32, 64) / 100, ties])
    q, scale = marlin.fp8_quantize(x, torch.ones(1))
    assert q.dtype is torch.float8_e4m3fn and _same(q, _nearest(x)) and scale == 1
    q, scale = marlin.fp8_quantize(x)
    assert scale.shape == (1,) and scale == x.abs().max() / 448
    assert _same(q, _nearest(x * (1 / scale))) and q.float().abs().max() == 448


def test_quantization_saturates_and_makes_no_nan():
    x = torch.tensor([[449.0, -1e9, torch.inf, -torch.inf, torch.nan, 0.0, 2.0**-12, 463.9]])
    q, _ = marlin.fp8_quantize(x, torch.ones(()))
    assert q.float().tolist() == [[448, -448, 448, -448, 448, 0, 0, 448]]
    zero, scale = marlin.fp8_quantize(torch.zeros(2, 4))
    assert scale == 0 and not (zero.float() * scale).any()


def test_quantization_with_a_scale_for_each_row_column_or_group():
    x = torch.randn(4, 6)
    rows, columns = torch.rand(4) + 0.5, torch.rand(6) + 0.5
    by_row = _nearest(x * (1 / rows)[:, None])
    assert _same(marlin.fp8_quantize(x, rows, group_shape=(1, -1))[0], by_row)
    assert _same(marlin.fp8_quantize(x, rows[:, None])[0], by_row)
    assert _same(marlin.fp8_quantize(x, columns, group_shape=(-1, 1))[0], _nearest(x * (1 / columns)))
    blocks = torch.rand(2, 3) + 0.5
    by_block = 1 / blocks.repeat_interleave(2, 0).repeat_interleave(2, 1)
    assert _same(marlin.fp8_quantize(x, blocks)[0], _nearest(x * by_block))
    q, scale = marlin.fp8_quantize(x, per_token=True, scale_ub=torch.tensor([1.0]))
    assert scale.shape == (4, 1) and torch.equal(scale, x.abs().amax(1, keepdim=True).clamp_max(1) / 448)
    assert _same(q, _nearest((x / scale).clamp(-448, 448)))
    with pytest.raises(ValueError, match="needs group_shape"):
        marlin.fp8_quantize(x, rows)
    with pytest.raises(ValueError, match="3 x 1 does not fit a tensor of 4 x 6"):
        marlin.fp8_quantize(x, torch.ones(3, 1))


@pytest.mark.parametrize("name", ["per tensor", "per token"])
def test_vllms_dynamic_quantization_runs_on_it(collected, name):
    _, tensors = collected
    x, q, scale = (tensors[f"dynamic {name} {part}"] for part in ("x", "q", "scale"))
    assert scale.shape == ((7, 1) if name == "per token" else (1,))
    assert ((q.float() * scale - x).abs() <= x.abs() / 16 + scale * 2.0**-10).all()


# --- in vLLM


def test_install_names_every_stand_in(collected):
    facts, _ = collected
    assert facts["notes"] == facts["again"] == [
        "FP8 quantization is plain torch here, for this vLLM has no such kernel on this platform",
        "gptq_marlin_repack is plain torch here, in Marlin's own 16 x 64 tiles",
        "marlin_gemm is plain torch here: it undoes Marlin's layout and multiplies in float32",
        "MarlinFP8ScaledMMLinearKernel claims this platform, which it leaves to other kernels by itself",
    ]
    assert "packs only 8 bits" in facts["4 bits"]


def test_install_puts_nothing_in_place_on_cuda(collected):
    facts, _ = collected
    assert facts["on cuda"] == [[], False]


def test_opt_with_the_stand_ins_agrees_with_per_channel_fp8(collected):
    logprobs = {name: torch.tensor(values) for name, values in collected[0]["logprobs"].items()}

    def gap(a: str, b: str) -> float:
        return (logprobs[a] - logprobs[b]).abs().mean().item()

    print({f"{a} - {b}": round(gap(a, b), 4) for a in logprobs for b in logprobs if a < b})
    assert logprobs["bfloat16"].std() > 2  # measured 2.85: what the gaps below, in nats, are to be compared with
    # the same FP8 weights without Marlin: only bfloat16 rounding is left, measured 0.026
    assert gap("marlin", "rounded") < 0.06
    # per channel has other scales and FP8 activations: measured 0.22 apart, 0.12 and 0.16 from bfloat16
    assert gap("marlin", "per channel") < 0.4
    assert gap("marlin", "bfloat16") < 0.4
    # a bias and scales in the wrong order, measured 2.2
    assert gap("mutant", "per channel") > 1 and gap("mutant", "rounded") > 1


if __name__ == "__main__":
    collect(Path(sys.argv[1]))
