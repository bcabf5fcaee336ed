"""Build a vLLM model the way vLLM does, on cpu, cuda or meta.

    model, config, notes = build_model(request)

vLLM's own EngineArgs, registry, config and `initialize_model` run. One stand-in, only on a platform without MLA
attention: `MLAAttention` becomes an empty module that owns no loadable weight. Such a model can be loaded and
processed but can't attend; the record says `load_only`.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from . import marlin

__all__ = ["CannotBuild", "build_model", "import_architecture", "prepare"]

# short names for the classes that one architecture may resolve to, depending on platform and release
MODEL_CLASSES = {
    "GlmMoeDsaForCausalLM": {
        "generic": "vllm.model_executor.models.deepseek_v2:GlmMoeDsaForCausalLM",
        "nvidia": "vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM",
        "amd": "vllm.models.deepseek_v32.amd.model:DeepseekV32ForCausalLM",
    },
    "DeepseekV32ForCausalLM": {
        "generic": "vllm.model_executor.models.deepseek_v2:DeepseekV3ForCausalLM",
        "nvidia": "vllm.models.deepseek_v32.nvidia.model:DeepseekV32ForCausalLM",
        "amd": "vllm.models.deepseek_v32.amd.model:DeepseekV32ForCausalLM",
    },
}


class CannotBuild(Exception):
    """Say in one sentence why this vLLM can't build this model here."""


def prepare() -> None:
    """Import what every build needs, so that a forked child starts warm. Starts no thread and binds no port."""
    import vllm  # noqa: F401
    import vllm.distributed  # noqa: F401
    import vllm.engine.arg_utils  # noqa: F401
    import vllm.model_executor.layers.attention.mla_attention  # noqa: F401
    import vllm.model_executor.model_loader.utils  # noqa: F401
    import vllm.model_executor.models.registry  # noqa: F401


def import_architecture(architecture: str) -> None:
    """Import the model class that vLLM's registry names, and register it as imported.

    vLLM inspects a class that is not imported yet in a new Python process (about 10 s), to keep CUDA out of this
    one. This puts in the registry what `ModelRegistry.register_model` puts there for a class that is imported already.
    """
    from vllm.model_executor.models.registry import ModelRegistry

    entry = ModelRegistry.models.get(architecture)
    if entry is None:
        return  # vLLM says so itself, in words, when the model is built
    if type(entry).__name__ == "_LazyRegisteredModel":
        ModelRegistry.models[architecture] = type_of_registered().from_model_cls(entry.load_model_cls())


def type_of_registered() -> Any:
    from vllm.model_executor.models import registry

    return registry._RegisteredModel


def _find_class(name: str | None, architecture: str, release: str, compiled: bool, notes: list[str]) -> type | None:
    if name is None:
        return None
    known = MODEL_CLASSES.get(architecture, {})
    target = name if ":" in name else known.get(name)
    if target is None and name == "generic":
        return None
    if target is None:
        names = ", ".join(sorted(known)) or "only generic"
        raise CannotBuild(f"{architecture} has no model class {name!r}; known here: {names}, or give module:Class")
    module, _, cls = target.partition(":")
    placeholders: list[str] = []
    try:
        with contextlib.nullcontext() if compiled else _placeholder_ops(placeholders):
            found = getattr(importlib.import_module(module), cls, None)
    except ModuleNotFoundError as e:
        if not module.startswith(e.name or "?"):  # the class is there, and something that it needs is not
            raise CannotBuild(f"vLLM {release} has {target}, but it does not import here: {e}") from e
        found = None
    if found is None:
        raise CannotBuild(f"vLLM {release} has no {target}; choose another --model-class or another release")
    if placeholders:
        notes.append(f"{len(placeholders)} compiled operations that this class names are placeholders, which raise when called")
    return found


@contextlib.contextmanager
def _placeholder_ops(named: list[str]) -> Iterator[None]:
    """Let a module be imported that names compiled operations which are not there; calling one raises."""
    namespace = type(torch.ops._C)
    original = namespace.__getattr__

    def __getattr__(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith("_"):
                raise
            named.append(f"{self.name}.{name}")
            return _Placeholder(named[-1])

    namespace.__getattr__ = __getattr__
    try:
        yield
    finally:
        namespace.__getattr__ = original


class _Placeholder:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, overload: str) -> _Placeholder:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"torch.ops.{self.name} is a compiled operation that this vLLM does not have here")


def _load_only_mla() -> None:
    """Replace MLAAttention by an empty module, in this process only."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.Module.__init__(self)
        if type(self) is MLAAttention:
            return
        # vLLM's DSA classes derive from MLAAttention and own their projections: those are kept. 0.25.1's insists on
        # an FP8 cache and a backend that takes FP8 queries, as its GPUs have; neither has a say in loading.
        self.layer_name, self.use_pcp, self.kv_cache_dtype = kwargs.get("prefix", ""), False, "fp8"
        self.impl = SimpleNamespace(supports_quant_query_input=True)
        for name, value in kwargs.items():
            if name not in ("prefix", "attn_backend"):
                setattr(self, name, value)

    MLAAttention.__init__ = __init__
    MLAAttention.process_weights_after_loading = lambda self, act_dtype: None


def _one_process(config: Any) -> None:
    """Start torch.distributed for a group of one, on a free loopback port."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with set_current_vllm_config(config):
        init_distributed_environment(world_size=1, rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}",
                                     local_rank=0, backend="gloo")
        initialize_model_parallel(1, 1)


def build_model(request: dict[str, Any]) -> tuple[torch.nn.Module, Any, list[str]]:
    """Build the request's model without loading it; return it with its VllmConfig and notes for the record.

    Raises CannotBuild with one sentence for an unknown architecture or class; anything else that vLLM raises
    passes through with its traceback.
    """
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    notes: list[str] = []
    device = request["device"]
    extra = {"load_format": "runai_streamer"} if request["delivery"]["order"] == "runai" else {}
    if request.get("kernel") == "marlin":
        notes += marlin.install()
        extra |= marlin.options()
    try:
        config = EngineArgs(
            model=request["checkpoint"], skip_tokenizer_init=True, max_model_len=128, enforce_eager=True,
            quantization=request.get("quantization"), **extra,
        ).create_engine_config()
    except Exception as e:
        # vLLM's config checks are pydantic models: the reason is the last sentence of a long message
        raise CannotBuild(f"vLLM {vllm.__version__} refuses this checkpoint's config: {_reason(e)}") from e
    cls = _find_class(request.get("model_class"), request["architecture"], vllm.__version__, request["compiled"], notes)
    _one_process(config)
    from vllm.platforms import current_platform

    hf = config.model_config.hf_text_config
    if current_platform.is_cpu() and getattr(hf, "kv_lora_rank", None):
        _load_only_mla()
        notes.append("load-only: MLAAttention is an empty module here, for this platform has no MLA attention")
    with set_current_vllm_config(config), _default_dtype(config.model_config.dtype), torch.device(device):
        model = initialize_model(vllm_config=config, **({"model_class": cls} if cls else {}))
    return model, config, notes


def _reason(e: Exception) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    for line in lines:
        if line.startswith("Value error, "):
            return line.removeprefix("Value error, ").split(" [type=")[0]
    return lines[0] if lines else type(e).__name__


class _default_dtype:
    """Hold torch's default dtype at the model's, as vLLM's loaders do."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exc: Any) -> None:
        torch.set_default_dtype(self.before)
