"""What all tests share: no network for models, one thread, and one warm vLLM process per variant."""

import gc
import os

import pytest

# Before anything imports torch or transformers; the workers that tests start inherit them.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
                  VLLM_NO_USAGE_STATS="1", MPLBACKEND="agg")


@pytest.fixture(scope="session")
def workers():
    """The workers that every run uses by default, so that a variant starts once for all tests; closed at the end."""
    from loadlens.workers import default_workers

    pool = default_workers()
    yield pool
    pool.close()


@pytest.fixture(scope="session", autouse=True)
def quick_collection():
    """Keep torch's own objects out of the collections that every recorded load ends with."""
    import torch._dynamo  # noqa: F401  torch imports it, and hundreds of modules with it, when a mode is first entered

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
