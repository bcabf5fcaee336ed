"""Watch vLLM's layerwise loading: what each layer counted, what it missed, and what made it process.

    watch = Layerwise()          # before the model is built: loaders are wrapped while it is
    watch.steps  ->  [{"layer": "…layers.0.self_attn.qkv_proj", "what": "counted", "parameter": "weight",
                       "load_numel": 589824, "total": 1769472, "delivery": 2, "tick": 11}, …]

vLLM counts the elements that reach a layer's wrapped weight loaders (`load_numel`) and processes the layer when
they reach its size (`load_numel_total`). Five functions of `reload/layerwise.py` are wrapped, in this process
only, to note what they did; none is replaced.

what: wrapped, counted, uncounted, trigger, materialize, processed, after
    counted    a wrapped loader buffered this tensor, and the counter moved (or not: elements says by how much)
    uncounted  a loader that is not wrapped wrote into a layer that is still counting, or has been processed
    trigger    the layer starts to process; `by` says whether a load fired it, or finalize
    after      a wrapped loader dropped a tensor because the layer had been processed
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .record import Recorder

__all__ = ["Layerwise"]


class Layerwise:
    """Note the steps of every layer that vLLM processes while loading; empty when this vLLM or model has none."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.recorder: Recorder | None = None
        self.layers: dict[int, torch.nn.Module] = {}  # those whose loaders were wrapped, by id, in order
        self.by_name: dict[str, torch.nn.Module] = {}
        self._inside: list[tuple[torch.nn.Module, str]] = []  # the wrapped loader that is running: (layer, parameter)
        self._processing: list[torch.nn.Module] = []
        self._finalizing = False
        try:
            from vllm.model_executor.model_loader.reload import layerwise
        except ImportError:
            return
        self.module = layerwise
        for name in ("make_online_process_loader", "get_numel_loaded", "_layerwise_process", "materialize_layer",
                     "finalize_layerwise_processing"):
            original = getattr(layerwise, name, None)
            if original is not None:
                setattr(layerwise, name, functools.wraps(original)(getattr(self, "_" + name.strip("_"))(original)))

    # ------------------------------------------------------------------ what happened

    def _step(self, layer: torch.nn.Module, what: str, **more: Any) -> None:
        r = self.recorder
        if r is None:  # still building the model
            return
        r.tick += 1
        info = self.module.get_layerwise_info(layer)
        self.steps.append(dict(tick=r.tick, delivery=len(r.names) - 1, round=r.round, layer=r.module_name(layer),
                               cls=type(layer).__name__, what=what, parameter=None, load_numel=info.load_numel,
                               total=info.load_numel_total, alive=r.alive_bytes) | more)

    def wrote(self, storage_name: str, elements: int) -> None:
        """Note a write that no wrapped loader made, into a layer that counts or has counted; called by the recorder."""
        if self._inside or self._processing or self._finalizing:
            return
        owner, _, parameter = storage_name.rpartition(".")
        layer = self.by_name.get(owner)
        if layer is not None:
            self._step(layer, "uncounted", parameter=parameter, elements=elements)

    @property
    def processing(self) -> bool:
        """Say whether vLLM is processing a layer now."""
        return bool(self._processing) or self._finalizing

    def attach(self, recorder: Recorder) -> None:
        """Start noting steps, under the names that the recorder gives the layers."""
        self.recorder = recorder
        self.by_name = {recorder.module_name(layer): layer for layer in self.layers.values()}

    # ------------------------------------------------------------------ vLLM's functions, wrapped

    def _make_online_process_loader(self, original: Any) -> Any:
        def make_online_process_loader(layer: torch.nn.Module, name: str) -> Any:
            inner = original(layer, name)
            self.layers[id(layer)] = layer
            if self.recorder is not None:
                self.by_name[self.recorder.module_name(layer)] = layer
            self._step(layer, "wrapped", parameter=name)

            # vLLM knows its wrapped loaders by this name, and unwraps them by __wrapped__
            def online_process_loader(*args: Any, **kwargs: Any) -> Any:
                if not self.module.get_layerwise_info(layer).can_load():
                    self._step(layer, "after", parameter=name)
                self._inside.append((layer, name))
                try:
                    return inner(*args, **kwargs)
                finally:
                    self._inside.pop()

            online_process_loader.__wrapped__ = inner
            return online_process_loader

        return make_online_process_loader

    def _get_numel_loaded(self, original: Any) -> Any:
        def get_numel_loaded(*args: Any, **kwargs: Any) -> Any:
            elements, returned = original(*args, **kwargs)
            if self._inside:
                layer, name = self._inside[-1]
                info = self.module.get_layerwise_info(layer)
                self._step(layer, "counted", parameter=name, elements=elements, load_numel=info.load_numel + elements)
            return elements, returned

        return get_numel_loaded

    def _layerwise_process(self, original: Any) -> Any:
        def _layerwise_process(layer: torch.nn.Module, info: Any) -> Any:
            by = "finalize" if self._finalizing else "load"
            self._step(layer, "trigger", by=by, parameter=self._inside[-1][1] if self._inside else None)
            self._processing.append(layer)
            try:
                return original(layer, info)
            finally:
                self._processing.pop()
                self._step(layer, "processed", by=by)

        return _layerwise_process

    def _materialize_layer(self, original: Any) -> Any:
        def materialize_layer(layer: torch.nn.Module, *args: Any) -> Any:
            result = original(layer, *args)
            self._step(layer, "materialize")
            return result

        return materialize_layer

    def _finalize_layerwise_processing(self, original: Any) -> Any:
        def finalize_layerwise_processing(*args: Any, **kwargs: Any) -> Any:
            self._finalizing = True
            try:
                return original(*args, **kwargs)
            finally:
                self._finalizing = False

        return finalize_layerwise_processing
