"""Fixes are recognised in real releases, and applying and taking back are exact."""

import ast
import re
import textwrap

import pytest

from loadlens.fixes import ABSENT, FIXES, NOT_APPLICABLE, PRESENT, diff, read_source, survey
from loadlens.variant import resolve

RELEASES = ["0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.0", "0.32.0"]
PR46168 = FIXES["pr46168"]

# A loader that hands over a pair once both halves are there; the dict it waits in is local to the call.
FORGETFUL = textwrap.dedent('''\
    class Loader:
        def load_weights(self, weights):
            pairs = []

            # Waiting room
            _pending_wk_fp8: dict = {}  # halves of pairs

            for name, value in weights:
                layer, half = name.split(".")
                _pending_wk_fp8.setdefault(layer, {})[half] = value
                if len(_pending_wk_fp8[layer]) == 2:
                    pairs.append(_pending_wk_fp8.pop(layer))
            return pairs
    ''')


def pairs_loaded(source: str, *calls: list[tuple[str, int]]) -> list[dict[str, int]]:
    """Run a loader's source and return the pairs that it completed over all calls."""
    namespace: dict = {}
    exec(source, namespace)
    loader = namespace["Loader"]()
    return [pair for call in calls for pair in loader.load_weights(call)]


def test_a_pair_split_over_two_calls_is_lost_without_the_fix_and_kept_with_it():
    weight, scale = [("0.weight", 1)], [("0.scale", 2)]
    pair = [{"weight": 1, "scale": 2}]
    assert pairs_loaded(FORGETFUL, weight + scale) == pair
    assert pairs_loaded(FORGETFUL, weight, scale) == []
    fixed = PR46168.apply(FORGETFUL)
    assert pairs_loaded(fixed, weight + scale) == pair
    assert pairs_loaded(fixed, weight, scale) == pair


def test_the_diff_shows_upstreams_form_and_keeps_annotation_and_comment():
    lines = diff(FORGETFUL, PR46168.apply(FORGETFUL), "models/loader.py").splitlines()
    assert [line.rstrip() for line in lines] == textwrap.dedent('''\
        --- a/vllm/models/loader.py
        +++ b/vllm/models/loader.py
        @@ -3,7 +3,9 @@
                 pairs = []

                 # Waiting room
        -        _pending_wk_fp8: dict = {}  # halves of pairs
        +        _pending_wk_fp8: dict = getattr(self, "_pending_indexer_wk_fp8", None)  # halves of pairs
        +        if _pending_wk_fp8 is None:
        +            self._pending_indexer_wk_fp8 = _pending_wk_fp8 = {}

                 for name, value in weights:
                     layer, half = name.split(".")
        ''').splitlines()


def test_a_site_says_where_it_is_and_in_what_state():
    (site,) = PR46168.sites(FORGETFUL)
    assert (site.line, site.where, site.state, site.name) == (6, "Loader.load_weights", ABSENT, "_pending_wk_fp8")
    (site,) = PR46168.sites(PR46168.apply(FORGETFUL))
    assert (site.line, site.where, site.state, site.name) == (6, "Loader.load_weights", PRESENT, "_pending_wk_fp8")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("head", ["", "# Δ before the class shifts bytes against characters\n", "\n\n"])
def test_line_endings_and_everything_around_a_site_stay_as_they_were(newline, head):
    source = (head + FORGETFUL).replace("\n", newline)
    fixed = PR46168.apply(source)
    assert fixed.count(newline) == fixed.count("\n") == source.count("\n") + 2
    assert PR46168.revert(fixed) == source
    assert PR46168.sites(source)[0].line == 6 + head.count("\n")


def test_several_sites_in_one_file_change_together():
    source = FORGETFUL + "\n\n" + FORGETFUL.replace("Loader", "Other").replace("_pending_wk_fp8", "pending_fp8_qkv")
    fixed = PR46168.apply(source)
    assert [site.where for site in PR46168.sites(fixed)] == ["Loader.load_weights", "Other.load_weights"]
    assert PR46168.state(fixed) == PRESENT and "self._pending_fp8_qkv = pending_fp8_qkv = {}" in fixed
    assert PR46168.revert(fixed) == source
    half_fixed = PR46168.apply(FORGETFUL) + source[len(FORGETFUL):]
    assert PR46168.state(half_fixed) == ABSENT and PR46168.apply(half_fixed) == fixed


@pytest.mark.parametrize("change", [
    ("load_weights", "_adapt_weights"),  # a generator that refuses out loud, as in dots3_note
    ("(self, ", "("),
    ("_pending_wk_fp8", "_pending_wk"),
    ("dict = {}", "dict = {0: {}}"),
    ("class Loader:", "def outer():"),
])
def test_code_of_another_structure_is_left_alone(change):
    source = FORGETFUL.replace(*change)
    assert PR46168.state(FORGETFUL) == ABSENT
    assert PR46168.state(source) == NOT_APPLICABLE
    assert PR46168.apply(source) == PR46168.revert(source) == source


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("fix", FIXES.values(), ids=FIXES)
def test_round_trips_are_exact_in_every_file_of_a_release(fix, release):
    variant = resolve(release)
    files = fix.files(variant.root)
    assert files
    for file in files:
        raw = (variant.package / file).read_bytes()
        source = read_source(variant.package / file)
        fixed, unfixed = fix.apply(source), fix.revert(source)
        assert (fixed == source, unfixed == source) == ((True, False) if fix.state(source) == PRESENT else
                                                        (False, True)), file
        assert {site.state for site in fix.sites(fixed)} == {PRESENT}, file
        assert {site.state for site in fix.sites(unfixed)} == {ABSENT}, file
        assert fix.revert(fixed).encode() == unfixed.encode(), file
        assert fix.apply(unfixed).encode() == fixed.encode(), file
        assert raw in (fix.revert(fixed).encode(), fix.apply(unfixed).encode()), file
        compile(fixed, file, "exec"), compile(unfixed, file, "exec")


V2, MTP = "model_executor/models/deepseek_v2.py", "model_executor/models/deepseek_mtp.py"
NVIDIA = "models/deepseek_v32/nvidia/model.py"


@pytest.mark.parametrize("release, expected", [
    ("0.24.0", {V2: ABSENT, MTP: ABSENT, NVIDIA: NOT_APPLICABLE}),
    ("0.25.1", {V2: PRESENT, MTP: ABSENT, NVIDIA: ABSENT}),
    ("0.32.0", {V2: PRESENT, MTP: ABSENT, NVIDIA: ABSENT}),
])
def test_survey_says_which_classes_keep_the_pair(release, expected):
    variant = resolve(release)
    sites = {site.file: site for site in survey(variant.root) if site.fix == "pr46168"}
    assert {file: sites[file].state for file in expected} == expected
    assert set(PR46168.known) <= set(sites)
    for file, site in sites.items():
        if site.state == NOT_APPLICABLE:
            assert site.line is None
        else:
            line = read_source(variant.package / file).splitlines()[site.line - 1]
            assert "fp8" in line and ("= {}" in line) == (site.state == ABSENT)


def test_upstreams_own_names_are_the_ones_that_applying_uses():
    for file in (V2, "model_executor/models/mimo_v2.py"):
        upstream = read_source(resolve("0.32.0").package / file)
        assert PR46168.state(upstream) == PRESENT
        assert PR46168.apply(PR46168.revert(upstream)) == upstream


# --- the story of the bias: pr41424, pr49586, pr49805, late-bias

RELOAD = "model_executor/model_loader/reload"
THREE = [f"{RELOAD}/{name}.py" for name in ("meta", "layerwise", "utils")]

# 0.26.0 in small: one set, read for two purposes, and a bias that arrives when it likes.
ONE_SET = textwrap.dedent('''\
    SKIP_MODULES: set[str] = {"HadamardTransform"}

    SKIP_TENSORS: set[str] = {
        "_expert_map",
    }


    def materialize_layer(layer, info):
        for name, tensor in get_layer_tensors(layer).items():
            if name not in SKIP_TENSORS and tensor.is_meta:
                setattr(layer, name, materialize_meta_tensor(tensor))
    ''')


def three_files(release: str, *changes: str) -> dict[str, str]:
    """Return the text of the three files that upstream changed, with changes such as "+pr49586" made in turn."""
    package = resolve(release).package
    texts = {file: read_source(package / file) for file in THREE}
    for change in changes:
        fix = FIXES[change[1:]]
        texts = {file: (fix.apply if change[0] == "+" else fix.revert)(text) for file, text in texts.items()}
    return texts


def sets(source: str) -> dict[str, set[str]]:
    """Run the assignments of the skip sets in a meta.py and return them."""
    namespace: dict = {}
    statements = [node for node in ast.parse(source).body if "SKIP_" in ast.unparse(node).partition("=")[0]
                  and isinstance(node, ast.AnnAssign)]
    exec(compile(ast.Module(statements, []), "meta.py", "exec"), namespace)
    return {name: value for name, value in namespace.items() if name.endswith("TENSORS")}


@pytest.mark.parametrize("order", [("pr49586", "pr49805"), ("pr49805", "pr49586")])
def test_0_26_0_with_both_changes_is_0_27_0_and_back(order):
    assert three_files("0.26.0", *("+" + name for name in order)) == three_files("0.27.0")
    assert three_files("0.27.0", *("-" + name for name in order)) == three_files("0.26.0")


@pytest.mark.parametrize("release", ["0.27.0", "0.32.0"])
def test_the_three_states_say_what_is_counted_and_what_stays_off_meta(release):
    known = {"_expert_map", "expert_mask", "expert_global_to_physical", "expert_physical_to_global",
             "expert_local_to_global", "e_score_correction_bias"}
    s2, s1, s0 = (three_files(release, *changes) for changes in [(), ("-pr49805",), ("-pr49805", "-pr49586")])
    assert sets(s2[THREE[0]]) == {"SKIP_LOAD_TENSORS": known, "SKIP_TENSORS": known | {"bias"}}
    assert sets(s1[THREE[0]]) == {"SKIP_TENSORS": known | {"bias"}}
    assert sets(s0[THREE[0]]) == {"SKIP_TENSORS": known}
    for file in THREE[1:]:  # which of the two sets the counter and the wrapper read
        assert "SKIP_LOAD_TENSORS" in s2[file] and not re.search(r"\bSKIP_TENSORS", s2[file])
        assert "SKIP_LOAD_TENSORS" not in s1[file] and re.search(r"\bSKIP_TENSORS", s1[file])
        assert s1[file] == s0[file]
    assert three_files(release, "-pr49805", "-pr49586", "+pr49586", "+pr49805") == s2
    only_first = three_files(release, "-pr49586")  # behaves as S0, in the form of S2
    assert sets(only_first[THREE[0]]) == {"SKIP_LOAD_TENSORS": known, "SKIP_TENSORS": known}
    assert three_files(release, "-pr49586", "-pr49805") == s0


@pytest.mark.parametrize("release, expected", [
    ("0.23.0", (PRESENT, ABSENT, ABSENT)), ("0.24.0", (PRESENT, ABSENT, ABSENT)), ("0.25.1", (PRESENT, ABSENT, ABSENT)),
    ("0.26.0", (PRESENT, ABSENT, ABSENT)), ("0.27.0", (PRESENT, PRESENT, PRESENT)),
    ("0.32.0", (PRESENT, PRESENT, PRESENT)),
])
def test_survey_says_which_release_has_which_change_of_the_bias(release, expected):
    sites = [site for site in survey(resolve(release).root) if site.fix != "pr46168"]
    assert [(site.fix, site.file) for site in sites] == [
        ("pr41424", THREE[0]), ("pr49586", THREE[0]), *(("pr49805", file) for file in sorted(THREE)),
        ("late-bias", THREE[1])]
    assert [site.state for site in sites] == [*expected[:2], *[expected[2]] * 3, ABSENT]
    assert {site.where for site in sites} <= {
        "materialize_layer", "SKIP_TENSORS", "SKIP_LOAD_TENSORS", "get_layer_size", "initialize_online_processing",
        "_wrap_parameters_weight_loader", "record_metadata_for_reloading"}
    for site in sites:
        line = (resolve(release).package / site.file).read_text().splitlines()[site.line - 1]
        assert "SKIP_" in line or "for layer in model.modules()" in line


@pytest.mark.parametrize("change, expected", [
    ("+pr49586", '''\
        @@ -2,6 +2,7 @@

         SKIP_TENSORS: set[str] = {
             "_expert_map",
        +    "bias",
         }


        '''),
    ("+pr49805", '''\
        @@ -1,8 +1,14 @@
        +# Modules whose tensors are never moved to, or materialized from, the meta device.
         SKIP_MODULES: set[str] = {"HadamardTransform"}

        -SKIP_TENSORS: set[str] = {
        +# Tensors never loaded by a weight loader, so the layerwise trigger ignores them.
        +SKIP_LOAD_TENSORS: set[str] = {
             "_expert_map",
         }
        +
        +# Tensors which are never moved to, or materialized from, the meta device.
        +# `bias` is built after create_weights(), so it is never on meta to begin with.
        +SKIP_TENSORS: set[str] = SKIP_LOAD_TENSORS | set()


         def materialize_layer(layer, info):
        '''),
    ("-pr41424", '''\
        @@ -7,5 +7,5 @@

         def materialize_layer(layer, info):
             for name, tensor in get_layer_tensors(layer).items():
        -        if name not in SKIP_TENSORS and tensor.is_meta:
        +        if name not in SKIP_TENSORS:
                     setattr(layer, name, materialize_meta_tensor(tensor))
        '''),
])
def test_the_diff_of_each_change_of_meta_py(change, expected):
    fix = FIXES[change[1:]]
    changed = (fix.apply if change[0] == "+" else fix.revert)(ONE_SET)
    lines = [line.rstrip() for line in diff(ONE_SET, changed, "meta.py").splitlines()]
    assert lines[2:] == textwrap.dedent(expected).rstrip(" ").splitlines()


def test_the_diff_of_late_bias_is_one_block_of_one_function():
    before, after = three_files("installed"), three_files("installed", "+late-bias")
    text = "".join(diff(before[file], after[file], file) for file in THREE)
    assert [line for line in text.splitlines() if re.match(r"[-+](?![-+])", line)] == [
        "+        # Parameters added after create_weights() (e.g., `bias`) are there now: wrap and",
        "+        # count them before the first load, which may be theirs.",
        "+        if info.can_load():",
        "+            initialize_online_processing(layer)"]
    assert FIXES["late-bias"].url == "" and "Our proposal" in FIXES["late-bias"].title


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("names", [(name,) for name in FIXES if name != "pr46168"] + [("pr49586", "pr49805")])
def test_changes_of_the_bias_keep_line_endings(names, newline):
    for file, text in three_files("0.26.0").items():
        source = changed = text.replace("\n", newline)
        for name in names:
            changed = FIXES[name].apply(changed)
        assert changed.count("\n") == changed.count(newline)
        for name in reversed(names):
            changed = FIXES[name].revert(changed)
        assert changed == (FIXES["pr41424"].revert(source) if names == ("pr41424",) else source), file


def test_comments_of_others_above_the_sets_stay():
    source = ONE_SET.replace("SKIP_MODULES:", "# theirs\nSKIP_MODULES:")
    source = source.replace("SKIP_TENSORS:", "# ours\nSKIP_TENSORS:")
    fixed = FIXES["pr49805"].apply(source)
    assert "# theirs\nSKIP_MODULES:" in fixed and "# ours\nSKIP_LOAD_TENSORS:" in fixed
    assert FIXES["pr49805"].revert(fixed) == source


@pytest.mark.parametrize("name, change", [
    ("pr49586", ('    "_expert_map",\n', '    "bias",\n    "_expert_map",\n')),  # taking it back would not be exact
    ("pr49586", ('{\n    "_expert_map",\n}', '{"_expert_map"}')),
    ("pr49805", ('{\n    "_expert_map",\n}', '{"_expert_map"}')),
    ("pr49805", ("SKIP_TENSORS: set[str]", "SKIPPED: set[str]")),
    ("pr41424", ("name not in SKIP_TENSORS and", "name not in SKIPPED and")),
    ("pr41424", ("def materialize_layer", "def materialize")),
])
def test_code_of_another_structure_is_left_alone_by_the_changes_of_the_bias(name, change):
    fix, source = FIXES[name], ONE_SET.replace(*change)
    assert source != ONE_SET and fix.state(ONE_SET) != NOT_APPLICABLE
    assert fix.state(source) == NOT_APPLICABLE
    assert fix.apply(source) == fix.revert(source) == source
