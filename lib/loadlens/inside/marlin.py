"""Marlin's CUDA-only operations in plain torch, so that vLLM's own Marlin Python runs on a machine without CUDA.

    >>> install()
    ['FP8 quantization is plain torch here: ...', 'gptq_marlin_repack is plain torch here, ...', ...]

vLLM's Python is not touched: its `Fp8` online method, `prepare_fp8_layer_for_marlin`, `marlin_permute_bias`,
`apply_fp8_marlin_linear` and its `reload` package call `torch.ops._C`, and that is where the stand-ins go, under the
names that this build of vLLM can't run. They are functions, not registered operations: whoever watches torch's
dispatcher sees the plain operations that they are made of, so where a value came from stays known through them.

What they are not: fast; the CUDA kernels' order of summation; any other type than FP8 E4M3 weights with 16-bit
activations. Layout and scales are the real ones: weights in Marlin's 16 x 64 tiles, scales and bias permuted.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["fp8_quantize", "install", "marlin_gemm", "marlin_repack", "marlin_unpack", "options"]

FP8_MAX = 448.0
MIN_SCALE = 1.0 / (FP8_MAX * 512)  # what the per-token kernel never goes below
TILE = 16
# vLLM multiplies this into the scales, because the kernel widens FP8 by moving bits and leaves the exponent's bias as
# it was: 2 ** (2 ** (bits - 1) - 2 ** (4 - 1)), for an exponent of 5 bits in float16 and of 8 in bfloat16
FUSED_EXPONENT_BIAS = {torch.float16: 2.0**8, torch.bfloat16: 2.0**120}


# --- the operations


def fp8_quantize(x: torch.Tensor, scale: torch.Tensor | None = None, *, per_token: bool = False,
                 scale_ub: torch.Tensor | None = None,
                 group_shape: tuple[int, int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `x` [m, n] to FP8 E4M3 [m, n]; return it with its float32 scale, `x` being about `q * scale`.

    `scale` given: [] or [1] for the whole tensor; [m / gm, n / gn] for groups; 1-D with `group_shape` (gm, gn), -1 for
    all, so that (-1, 1) is one a column and (1, -1) one a row. `scale` None: from the largest magnitude, [1], or [m, 1]
    with `per_token`, where `scale_ub` [1] bounds that magnitude. Beyond 448 values saturate.
    As the CUDA kernels (scaled_fp8_conversion): multiplied by 1 / scale, but divided per token; a NaN becomes 448.
    Raises ValueError for a scale whose shape does not fit.
    """
    wide = x.float()
    if scale is not None:
        return _to_fp8(wide * (1.0 / _spread(scale.float(), x.shape, group_shape))), scale
    if per_token:
        amax = wide.abs().amax(dim=-1, keepdim=True)  # [m, 1]
        if scale_ub is not None:
            amax = torch.minimum(amax, scale_ub)
        scale = (amax / FP8_MAX).clamp_min(MIN_SCALE)
        return _to_fp8(wide / scale), scale
    scale = (wide.abs().amax() / FP8_MAX).reshape(1)
    return _to_fp8(wide * (1.0 / scale)), scale


def _to_fp8(wide: torch.Tensor) -> torch.Tensor:
    # fmin and fmax pass over NaN, as CUDA's fminf and fmaxf do; clamp would keep it
    limit = wide.new_full((), FP8_MAX)
    return torch.fmax(torch.fmin(wide, limit), -limit).to(torch.float8_e4m3fn)


def _spread(scale: torch.Tensor, shape: torch.Size, group_shape: tuple[int, int] | None) -> torch.Tensor:
    """Return `scale` as [1, 1] or spread over [m, n]."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    m, n = shape
    if scale.dim() == 1:
        if group_shape is None:
            raise ValueError("a 1-D scale needs group_shape: (-1, 1) for one a column, (1, -1) for one a row")
        gm, gn = (size if g == -1 else g for g, size in zip(group_shape, shape))
        scale = scale.reshape(m // gm, n // gn)
    rows, columns = scale.shape
    if m % rows or n % columns:
        raise ValueError(f"a scale of {rows} x {columns} does not fit a tensor of {m} x {n}")
    return scale.repeat_interleave(m // rows, 0).repeat_interleave(n // columns, 1)


def _weight_order(device: torch.device) -> torch.Tensor:
    """Return, for each of the 1024 bytes of a packed 16 x 64 tile, its place in four 16 x 16 tiles side by side.

    A warp's lane holds two columns, 8 apart, of two pairs of rows, 8 apart (the B fragment of mma.m16n8k16), in each of
    the four tiles; within four bytes the rows go 0, 8, 1, 9, for the widening to 16 bits takes every other byte.
    """
    lane = torch.arange(32, device=device).view(32, 1, 1, 1)
    tile = torch.arange(4, device=device).view(1, 4, 1, 1)
    half = torch.arange(2, device=device).view(1, 1, 2, 1)
    row = 2 * (lane % 4) + torch.tensor([0, 8, 1, 9], device=device)  # [32, 1, 1, 4]
    return (256 * tile + 16 * row + lane // 4 + 8 * half).reshape(-1)  # [1024]


def _scale_order(groups: int, device: torch.device) -> torch.Tensor:
    """Return the order that `marlin_permute_scales` gives to 64 columns of group scales, or to 32 of one row's."""
    if groups > 1:
        return (torch.arange(8, device=device).view(8, 1) + 8 * torch.arange(8, device=device)).reshape(-1)  # [64]
    pair = torch.tensor([0, 1, 8, 9, 16, 17, 24, 25], device=device)
    return (2 * torch.arange(4, device=device).view(4, 1) + pair).reshape(-1)  # [32]


def _put_back(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Undo an order that was applied to each run of len(order) elements."""
    return values.reshape(-1, order.numel())[:, torch.argsort(order)].reshape(values.shape)


def marlin_repack(q_weight: torch.Tensor, size_k: int, size_n: int) -> torch.Tensor:
    """Repack 8-bit weights from GPTQ's layout, int32 [k / 4, n], to Marlin's, int32 [k / 16, n * 4].

    An int32 of the input holds four consecutive k of one n, lowest first. Raises ValueError unless n % 64 and k % 16
    are 0.
    """
    if size_k % TILE or size_n % (4 * TILE) or q_weight.shape != (size_k // 4, size_n):
        raise ValueError(f"Marlin packs int32 [k / 4, n] with k a multiple of 16 and n of 64, "
                         f"not {list(q_weight.shape)} for k = {size_k}, n = {size_n}")
    w = q_weight.contiguous().view(torch.uint8).view(size_k // 4, size_n, 4).permute(0, 2, 1)  # [k / 4, 4, n]
    w = w.reshape(size_k // TILE, TILE, size_n // TILE, TILE).permute(0, 2, 1, 3)  # [k / 16, n / 16, 16, 16]
    order = _weight_order(w.device)
    w = w.reshape(-1, order.numel())[:, order].reshape(size_k // TILE, size_n * TILE)
    return w.contiguous().view(torch.int32)


def marlin_unpack(packed: torch.Tensor, size_k: int, size_n: int) -> torch.Tensor:
    """Undo `marlin_repack`: from int32 [k / 16, n * 4] to FP8 E4M3 [k, n]."""
    w = packed.contiguous().view(torch.uint8).view(size_k // TILE, size_n * TILE)
    w = _put_back(w, _weight_order(w.device)).view(size_k // TILE, size_n // TILE, TILE, TILE)
    return w.permute(0, 2, 1, 3).reshape(size_k, size_n).view(torch.float8_e4m3fn)


def marlin_gemm(a: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, size_n: int,
                size_k: int) -> torch.Tensor:
    """Return `a` [m, k] times the packed weight, times its scales, plus bias, as [m, n] in the dtype of `a`.

    `packed` int32 [k / 16, n * 4]; `scales` [groups, n] in float16 or bfloat16, permuted and with the exponent's bias
    multiplied in; `bias` [n], permuted. All as `prepare_fp8_layer_for_marlin` leaves them, k and n padded. The sums are
    float32, rounded once at the end.
    """
    w = marlin_unpack(packed, size_k, size_n).float()  # [k, n]
    groups = scales.shape[0]
    s = _put_back(scales.float(), _scale_order(groups, scales.device))  # [groups, n]
    s = s / FUSED_EXPONENT_BIAS[scales.dtype]
    if groups > 1:
        out = a.float() @ (w * s.repeat_interleave(size_k // groups, 0))
    else:
        out = (a.float() @ w) * s  # [m, n]
    if bias is not None:
        out = out + _put_back(bias.float(), _scale_order(1, bias.device))
    return out.to(a.dtype)


# --- under vLLM's names


def _static_quant(result: torch.Tensor, x: torch.Tensor, scale: torch.Tensor,
                  group_shape: tuple[int, int] | None = None) -> None:
    result[: x.shape[0]].copy_(fp8_quantize(x, scale, group_shape=group_shape)[0])


def _dynamic_quant(result: torch.Tensor, x: torch.Tensor, scale: torch.Tensor) -> None:
    q, s = fp8_quantize(x)
    result[: x.shape[0]].copy_(q)
    scale.copy_(s)


def _per_token_quant(result: torch.Tensor, x: torch.Tensor, scale: torch.Tensor,
                     scale_ub: torch.Tensor | None = None) -> None:
    q, s = fp8_quantize(x, per_token=True, scale_ub=scale_ub)
    result[: x.shape[0]].copy_(q)
    scale[: x.shape[0]].copy_(s)


def _operations() -> dict[str, tuple[Callable, str]]:
    """Return {name: (function, note)}, each called as this release's `vllm._custom_ops` calls it."""
    import vllm._custom_ops as ops
    from vllm.scalar_type import scalar_types

    fp8 = scalar_types.float8_e4m3fn.id
    # up to 0.27.0 both operations take the row order of GPTQ's act-order, and the GEMM two tensors for it
    act_order = "perm" in inspect.signature(ops.gptq_marlin_repack).parameters

    def repack(q_weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        if act_order and rest[0].numel():
            raise NotImplementedError("the plain torch gptq_marlin_repack has no act-order")
        size_k, size_n, num_bits, *a_8bit = rest[1:] if act_order else rest
        if num_bits != 8 or any(a_8bit):
            raise NotImplementedError("the plain torch gptq_marlin_repack packs only 8 bits for 16-bit activations")
        return marlin_repack(q_weight, size_k, size_n)

    def gemm(a: torch.Tensor, c: Any, packed: torch.Tensor, bias: Any, scales: torch.Tensor, a_scales: Any,
             global_scale: Any, zeros: Any, *rest: Any) -> torch.Tensor:
        order, rest = (rest[:2], rest[2:]) if act_order else ((), rest)
        _, type_id, _, size_n, size_k = rest[:5]
        if type_id != fp8 or any(t is not None and t.numel() for t in (c, a_scales, global_scale, zeros, *order)):
            raise NotImplementedError("the plain torch marlin_gemm takes only FP8 E4M3 weights and 16-bit activations")
        return marlin_gemm(a, packed, scales, bias, size_n, size_k)

    quantization = "FP8 quantization is plain torch here, for this vLLM has no such kernel on this platform"
    return {
        "static_scaled_fp8_quant": (_static_quant, quantization),
        "dynamic_scaled_fp8_quant": (_dynamic_quant, quantization),
        "dynamic_per_token_scaled_fp8_quant": (_per_token_quant, quantization),
        "gptq_marlin_repack": (repack, "gptq_marlin_repack is plain torch here, in Marlin's own 16 x 64 tiles"),
        "marlin_gemm": (gemm, "marlin_gemm is plain torch here: it undoes Marlin's layout and multiplies in float32"),
    }


def _has_kernel(name: str) -> bool:
    # vLLM's CPU extension declares some of its CUDA operations without arguments and without a kernel
    return hasattr(torch.ops._C, name) and torch._C._dispatch_has_kernel_for_dispatch_key(f"_C::{name}", "CPU")


def options() -> dict[str, str]:
    """Return what to give EngineArgs (or LLM) so that vLLM chooses Marlin: its own option, where it has one."""
    from vllm.engine.arg_utils import EngineArgs

    return {"linear_backend": "marlin"} if "linear_backend" in EngineArgs.__dataclass_fields__ else {}


def install() -> list[str]:
    """Let this process's vLLM run Marlin for FP8; return one sentence for each stand-in, none on CUDA.

    Call it before a model is built, and give `options()` to EngineArgs. Only operations that this vLLM can't run are
    put in place. Calling it again changes nothing.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        if "VLLM_TEST_FORCE_FP8_MARLIN" in envs.environment_variables:  # gone by 0.32.0, where options() is enough
            os.environ["VLLM_TEST_FORCE_FP8_MARLIN"] = "1"
        return []
    from vllm.model_executor.kernels import linear

    notes = []
    for name, (function, note) in _operations().items():
        known = getattr(torch.ops._C, name, None)
        if getattr(known, "__module__", None) != __name__:
            if _has_kernel(name):
                continue
            setattr(torch.ops._C, name, function)
        if note not in notes:
            notes.append(note)
    kernel = linear.MarlinFP8ScaledMMLinearKernel
    mine = linear._POSSIBLE_FP8_KERNELS.setdefault(current_platform._enum, [])
    if kernel not in mine:
        kernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
        mine.insert(0, kernel)
    return [*notes, "MarlinFP8ScaledMMLinearKernel claims this platform, which it leaves to other kernels by itself"]
