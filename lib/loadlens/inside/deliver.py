"""Drive `load_weights` the way a Delivery says: which tensors, in which calls, out of whose buffer.

    deliver_round(model, config, request)      # calls model.load_weights once or often

The tensors come from the checkpoint's own safetensors files through safetensors' reader, or through vLLM's
own Run:ai streamer for the delivery `runai`. Nothing here decides an order: the host did (`delivery.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

__all__ = ["Tensors", "deliver_round", "reused_buffer"]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}


class Tensors:
    """Reads tensors by name; on meta only their shapes."""

    def __init__(self, request: dict[str, Any], device: str) -> None:
        self.device, self.root, self.tensors, self.files = device, Path(request["checkpoint"]), request["tensors"], {}

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape, file = self.tensors[name]
        if self.device == "meta":
            return torch.empty(shape, dtype=DTYPES[dtype], device="meta")
        if file not in self.files:
            self.files[file] = safe_open(self.root / file, framework="pt")
        return self.files[file].get_tensor(name)


def reused_buffer(weights: Iterable[tuple[str, torch.Tensor]], largest: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass every tensor through one staging buffer of `largest` bytes, overwritten as soon as the next is asked for.

    What a streaming loader or an RL weight-sync bucket does. After the last tensor the buffer is overwritten too.
    """
    buffer = None
    for name, t in weights:
        if t.is_meta:
            buffer = torch.empty(largest, dtype=torch.uint8, device="meta") if buffer is None else buffer
        else:
            buffer = torch.empty(largest, dtype=torch.uint8) if buffer is None else buffer
            buffer[: t.nbytes].copy_(t.reshape(-1).view(torch.uint8))
        yield name, buffer[: t.nbytes].view(t.dtype).view(t.shape)
        if not buffer.is_meta:
            buffer[: t.nbytes].fill_(0xA5)


def deliver_round(model: torch.nn.Module, config: Any, request: dict[str, Any]) -> None:
    """Deliver the whole checkpoint once, in as many outer `load_weights` calls as the delivery has."""
    delivery = request["delivery"]
    largest = request["largest"]
    if delivery["order"] == "runai":
        _through_vllm(model, config, delivery["reused_buffer"], largest)
        return
    source = Tensors(request, request["device"])
    # a producer reads on across call boundaries: one iterator, cut into calls
    weights: Iterator[tuple[str, torch.Tensor]] = ((n, source[n]) for call in delivery["calls"] for n in call)
    if delivery["reused_buffer"]:
        weights = reused_buffer(weights, largest)
    for call in delivery["calls"]:
        model.load_weights(_take(weights, len(call)))
    for _ in weights:  # let the producer finish (it overwrites its buffer a last time)
        pass


def _take(weights: Iterator[tuple[str, torch.Tensor]], n: int) -> Iterator[tuple[str, torch.Tensor]]:
    for _ in range(n):
        yield next(weights)


def _through_vllm(model: torch.nn.Module, config: Any, reuse: bool, largest: int) -> None:
    """Let vLLM's own loader for the configured load format call `model.load_weights`."""
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(config.load_config)
    if reuse:
        original = model.load_weights
        model.load_weights = lambda weights: original(reused_buffer(weights, largest))
    loader.load_weights(model, config.model_config)
