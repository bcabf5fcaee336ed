"""Run a model that was loaded by a Delivery, in vLLM's own engine.

    generate(request)  ->  [{"prompt": [2, 5, 6], "tokens": [17, 4, …], "logprobs": [-0.8, …], "prompt_logprobs": [-6.2, …]}]

vLLM's `LLM` builds, schedules, attends and samples; only the loader is ours: it is registered under the load format
`loadlens` and hands the tensors to `load_weights` as the delivery says, so that the very load that broke a law answers.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .deliver import deliver_round
from .record import poison_model

__all__ = ["generate"]


def _register(request: dict[str, Any]) -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("loadlens")
    class DeliveryLoader(BaseModelLoader):
        """Deliver the checkpoint as the request says, into parameters that were filled first."""

        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            with torch.no_grad():
                poison_model(model, request["poison"])
            deliver_round(model, None, request)


def generate(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Load by the request's delivery and answer its prompts greedily; token ids, and log-probabilities in nats.

    Returns for each prompt {prompt, tokens, logprobs, prompt_logprobs}; a log-probability that is not finite is None.
    """
    from vllm import LLM, SamplingParams

    _register(request)
    options = {}
    if request.get("kernel") == "marlin":
        from . import marlin

        marlin.install()
        options = marlin.options()
    engine = LLM(request["checkpoint"], skip_tokenizer_init=True, max_model_len=request["max_model_len"], enforce_eager=True,
                 quantization=request.get("quantization"), load_format="loadlens", kv_cache_memory_bytes=64 << 20, dtype="bfloat16", seed=0, **options)
    sampling = SamplingParams(max_tokens=request["max_tokens"], temperature=0, detokenize=False, logprobs=1, prompt_logprobs=1)
    outputs = engine.generate([{"prompt_token_ids": p} for p in request["prompts"]], sampling, use_tqdm=False)
    return [dict(prompt=list(o.prompt_token_ids), tokens=list(o.outputs[0].token_ids),
                 logprobs=[_finite(chosen[t].logprob) for t, chosen in zip(o.outputs[0].token_ids, o.outputs[0].logprobs)],
                 prompt_logprobs=[_finite(given[t].logprob) for t, given in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:])])
            for o in outputs]


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None
