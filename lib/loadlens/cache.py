"""Things that are made once and kept: unpacked releases, changed variants, recipes.

    cache_dir("releases")  ->  ~/.cache/loadlens/releases     ($LOADLENS_CACHE moves it)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["cache_dir", "make_once"]


def cache_dir(kind: str) -> Path:
    """Return the folder that keeps one kind of thing, making it when needed.

    The folder is `$LOADLENS_CACHE/<kind>`, else `$XDG_CACHE_HOME/loadlens/<kind>`, else `~/.cache/loadlens/<kind>`.
    """
    base = os.environ.get("LOADLENS_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "loadlens")
    folder = Path(base).absolute() / kind
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Make `folder` by calling `build(empty_folder)`, unless it exists; return `folder`.

    Built beside its place and renamed into it, under a lock: two processes never see half of it, and a
    `build` that raises leaves nothing behind.
    """
    if folder.exists():
        return folder
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                build(draft)
                draft.rename(folder)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    return folder
