"""Every figure draws a healthy and a broken load, in the fixed colours, and leaves nothing behind."""

import io

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import loadlens as ll
from loadlens import figures
from loadlens.figures import COLOURS

GLM = "recipe:glm-dsa-fp8"
PAIR = [f"model.layers.1.self_attn.indexer.wk.weight{half}" for half in ("_scale_inv", "")]
WRITTEN, LOST, DELIVERED = (COLOURS[k].lower() for k in ("written", "lost", "delivered"))


@pytest.fixture(scope="module")
def broken(workers):
    return ll.run(GLM, delivery="file", model_class="nvidia")


@pytest.fixture(scope="module")
def healthy(workers):
    return ll.run(GLM, model_class="nvidia")


@pytest.fixture(autouse=True)
def no_figure_stays_open():
    plt.close("all")
    before = dict(plt.rcParams)
    yield
    assert plt.get_fignums() == [] and dict(plt.rcParams) == before


def drawn(figure: Figure) -> Figure:
    """Check that a figure really renders, without a warning; return it."""
    assert isinstance(figure, Figure)
    figure.savefig(io.BytesIO(), format="png", dpi=40)
    return figure


def words(figure: Figure) -> list[str]:
    """Every text that the figure shows."""
    drawn(figure)
    found = []
    for ax in figure.axes:
        found += [*ax.texts, ax.xaxis.label, ax.yaxis.label, *ax.get_xticklabels(), *ax.get_yticklabels()]
        found += ax.get_legend().get_texts() if ax.get_legend() else []
    return [t.get_text() for t in found if t.get_text()]


def colours(figure: Figure) -> set[str]:
    """The colours of bars, boxes, lines and markers."""
    found = {to_hex(p.get_facecolor()) for ax in figure.axes for p in ax.patches}
    return found | {to_hex(line.get_color()) for ax in figure.axes for line in ax.lines}


pytestmark = pytest.mark.filterwarnings("error")


def test_meanings_have_colours_that_differ_and_fall_in_brightness():
    assert len(set(COLOURS.values())) == len(COLOURS)

    def brightness(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    # written and lost are told apart in grey, and both from what is merely delivered
    assert brightness(COLOURS["delivered"]) - brightness(COLOURS["lost"]) > 40
    assert brightness(COLOURS["lost"]) - brightness(COLOURS["written"]) > 15


def test_the_six_nouns():
    nouns = ["Checkpoint", "Delivery", "Variant", "Run", "Law", "Finding"]
    assert [w for w in words(figures.nouns()) if w in nouns] == nouns


def test_a_tape_has_a_cell_a_tensor_and_joins_each_pair():
    checkpoint = ll.open_checkpoint(GLM)
    figure = figures.tape(checkpoint)
    said = words(figure)
    assert "position in the file, 1 to 85" in said and "lm_head.weight" in said
    assert {"F32 (5)", "BF16 (77)", "F8_E4M3 (3)"} <= set(said)
    (ax,) = figure.axes
    assert len(ax.patches) == 85
    assert sum(t.get_text() == "" for t in ax.texts) == 3  # an arc is an annotation without words
    drawn(figures.tape(ll.open_checkpoint("recipe:opt-125m")))  # no pair, and no such tensor to point at


def test_calls_show_how_one_outer_call_became_two(broken, healthy):
    said = words(figures.calls(broken))
    assert [w for w in said if "Deepseek" in w] == [
        "DeepseekV32ForCausalLM: 85 tensors", "DeepseekV32Model: 5 tensors", "DeepseekV32Model: 79 tensors"]
    assert colours(figures.calls(broken)) == {DELIVERED, WRITTEN}
    assert len([w for w in words(figures.calls(healthy)) if "Deepseek" in w]) == 2


def test_many_calls_are_cut_and_counted(workers):
    run = ll.run(GLM, delivery="per-tensor", model_class="nvidia")
    said = words(figures.calls(run, most=5))
    assert len([w for w in said if "Deepseek" in w]) == 5
    assert "… and 164 more calls" in said  # 85 outer and 84 inner ones


def test_a_lost_tensor_dies_with_its_call_and_a_written_one_in_its_time(broken, healthy):
    figure = figures.lifetimes(broken, PAIR)
    said = words(figure)
    assert [w for w in said if w.startswith("layer 1")] == [
        "layer 1  indexer.wk.weight_scale_inv", "layer 1  indexer.wk.weight"]
    assert said.count("DeepseekV32Model\ncall ends") == 2
    assert LOST in colours(figure) and WRITTEN not in colours(figure)
    figure = figures.lifetimes(healthy, PAIR)
    assert WRITTEN in colours(drawn(figure)) and LOST not in colours(figure)


def test_coverage_is_a_bar_a_layer_with_the_hole_in_it(broken, healthy):
    figure = figures.coverage(broken, "wk_weights_proj.weight")
    said = words(figure)
    assert [w for w in said if w.startswith("layer")] == ["layer 0", "layer 1", "layer 2"]
    assert said.count("4 of 132 rows") == 3 and {"never written", "written from the checkpoint"} <= set(said)
    assert colours(figure) == {WRITTEN, LOST}
    hatches = {p.get_hatch() for p in figure.axes[0].patches if to_hex(p.get_facecolor()) == LOST}
    assert hatches == {"////"}  # legible in grey
    figure = figures.coverage(healthy, "wk_weights_proj.weight")
    assert words(figure).count("132 of 132 rows") == 3 and colours(figure) == {WRITTEN}


def test_a_whole_load_marks_what_was_lost(broken, healthy):
    figure = figures.load(broken)
    assert "✕ lost: 6" in words(figure) and colours(figure) == {WRITTEN, LOST}
    assert not [w for w in words(figures.load(healthy)) if "lost" in w]


def test_a_matrix_has_a_word_in_every_cell():
    frame = pd.DataFrame([
        dict(delivery="sorted", variant="0.32.0", outcome="PASS", broken="", lost=0),
        dict(delivery="file", variant="0.32.0", outcome="FAIL", broken="L1 L2 L3", lost=6),
        dict(delivery="sorted", variant="0.23.0", outcome="UNRESOLVED", broken="", lost=None),
        dict(delivery="file", variant="0.23.0", outcome="FAIL", broken="L1", lost=0)])
    figure = figures.matrix(frame, rows="delivery", columns="variant")
    said = words(figure)
    assert said[:4] == ["whole", "6 lost", "n/a", "breaks L1"]
    assert {"sorted", "file", "0.32.0", "0.23.0"} <= set(said)
    assert len({to_hex(p.get_facecolor()) for p in figure.axes[0].patches}) == 3
