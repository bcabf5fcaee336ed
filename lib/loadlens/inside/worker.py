"""The vLLM process: import once, then fork a child for every experiment.

    python -m loadlens.inside.worker            # reads one JSON request a line, answers one JSON line each
    python -m loadlens.inside.worker --cold     # the same without forking: one request, then the end

Answers go to the first stdout; what vLLM prints goes to the run's `log.txt`. The worker ends when its stdin does,
and takes its child with it. A child that crashes, or is killed, is an answer: {"ended": {"signal": 9}}.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Serve requests until stdin closes."""
    cold = "--cold" in sys.argv
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever vLLM prints must not be taken for an answer

    from . import build, experiment  # noqa: F401

    try:
        build.prepare()
    except Exception as e:  # this vLLM does not import here: the host says so
        _answer(answers, {"broken": f"{type(e).__name__}: {e}"})
        return
    import torch

    torch.set_num_threads(1)  # a second OpenMP thread would not survive a fork
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    _answer(answers, {"ready": True, "threads": threads})
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
        _answer(answers, {"ended": _in_child(request, answers)})


def _answer(answers: Any, value: dict[str, Any]) -> None:
    print(json.dumps(value), file=answers, flush=True)


def _experiment(request: dict[str, Any]) -> None:
    from .experiment import run_experiment

    log = open(Path(request["out"]) / "log.txt", "w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    run_experiment(request)


def _in_child(request: dict[str, Any], answers: Any) -> dict[str, Any]:
    """Fork, run, and wait; kill the child when stdin closes, for then nobody waits for it any more."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()  # so that whatever it starts can be ended with it
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            _experiment(request)
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
            os.waitpid(pid, 0)
            os._exit(0)
    finally:
        os.close(watch)
    _end_group(pid)  # what the child started and left behind
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status)}
    return {"code": os.WEXITSTATUS(status)}


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


if __name__ == "__main__":
    main()
