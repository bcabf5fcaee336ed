"""The vLLM process: import once, then fork a child for every experiment.

    python -m loadlens.inside.worker --seed FD  # imports what all vLLMs share; forks a worker for each message on FD
    python -m loadlens.inside.worker --cold     # a worker without forking: one request, then the end

A worker reads one JSON request a line and answers in JSON lines.

Answers go to the first stdout; what vLLM prints goes to the run's `log.txt`. The worker ends when its stdin does,
and takes its child with it. A child that crashes, or is killed, is an answer: {"ended": {"signal": 9}}.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]


# what every vLLM imports and none of them changes; more than half of the time that `import vllm` takes
SHARED = ("torch", "torch._dynamo", "torch._inductor.lowering", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers",
          "transformers.models.auto.modeling_auto", "transformers.models.auto.processing_auto", "transformers.masking_utils",
          "openai.types.responses", "pydantic", "numpy", "PIL", "zmq", "msgspec", "fastapi", "cv2", "mistral_common", "xgrammar")


def main() -> None:
    """Serve as a seed, or as a worker until stdin closes."""
    if "--seed" in sys.argv:
        _seed(socket.socket(fileno=int(sys.argv[-1])))
    else:
        _die_with_parent()
        _serve(cold=True)


def _seed(control: socket.socket) -> None:
    """Import what all variants share; fork a worker for each message, until the other end closes."""
    for name in SHARED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers are reaped at once
    control.send(json.dumps({"threads": _threads()}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                control.close()
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for i, fd in enumerate(fds):
                    os.dup2(fd, i)
                    os.close(fd)
                sys.stdin = open(0, closefd=False)
                what = json.loads(message)
                os.environ.clear()
                os.environ.update(what["environment"])
                sys.path.insert(0, what["root"])
                importlib.invalidate_caches()
                _serve(cold=False)
                code = 0
            finally:
                os._exit(code)
        for fd in fds:
            os.close(fd)
        control.send(json.dumps({"pid": pid}).encode())


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _threads() -> int:
    import torch

    torch.set_num_threads(1)  # a second OpenMP thread would not survive a fork
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1


def _serve(cold: bool) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints must not be taken for an answer

    from . import build, experiment  # noqa: F401

    try:
        build.prepare()
    except Exception as e:  # this vLLM does not import here: the host says so
        _answer(answers, {"broken": f"{type(e).__name__}: {e}"})
        return
    _answer(answers, {"ready": True, "threads": _threads()})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            build.import_architecture(request["architecture"])
        except Exception:
            pass  # the experiment meets the same error, and records it
        if cold:
            _experiment(request)
            _answer(answers, {"ended": {"code": 0}})
            return
        ended, missed = _in_child(request, answers)
        _answer(answers, {"ended": ended})
        _learn(missed)


def _learn(modules: list[str]) -> None:
    """Import what a child had to import by itself, so that the next one finds it there."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _answer(answers: Any, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)


def _experiment(request: dict[str, Any]) -> None:
    from .experiment import run_experiment

    log = open(Path(request["out"]) / "log.txt", "w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    run_experiment(request)


def _in_child(request: dict[str, Any], answers: Any) -> tuple[dict[str, Any], list[str]]:
    """Fork, run, and wait; return how it ended, and which of vLLM's modules it had to import.

    The child is killed when stdin closes, for then nobody waits for it any more.
    """
    imported, here = Path(request["out"]) / "imported.json", set(sys.modules)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()  # so that whatever it starts can be ended with it
            _die_with_parent()
            _experiment(request)
            if request["compiled"]:  # else an import may have needed stand-ins that this process does not have
                imported.write_text(json.dumps([m for m in sys.modules if m.startswith("vllm.") and m not in here]))
            code = 0
        finally:
            os._exit(code)
    _answer(answers, {"started": pid})
    watch = os.pidfd_open(pid)
    try:
        while True:
            ready, _, _ = select.select([watch, 0], [], [])
            if watch in ready:
                _, status = os.waitpid(pid, 0)
                break
            # stdin speaks only when the host is gone: it never sends a request before the last one's answer
            _end_group(pid)
            os.kill(pid, signal.SIGKILL)  # right after its start it does not lead a group yet
            os.waitpid(pid, 0)
            os._exit(0)
    finally:
        os.close(watch)
    _end_group(pid)  # what the child started and left behind
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}, []
    return {"code": os.WEXITSTATUS(status)}, json.loads(imported.read_text()) if imported.exists() else []


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


if __name__ == "__main__":
    main()
    os._exit(0)  # taking vLLM and torch down takes seconds, and there is nothing left to save
