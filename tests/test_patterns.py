"""Numbers in names collapse to ranges, and nothing else in a name changes."""

import pytest

from loadlens.patterns import collapse, layer_of, ranges


@pytest.mark.parametrize("numbers, text", [
    ([], ""), ([3], "3"), ([0, 1, 2], "0..2"), ([0, 1], "0..1"), ([2, 0, 1, 0], "0..2"), ([0, 2, 3, 9], "0,2..3,9")])
def test_ranges(numbers, text):
    assert ranges(numbers) == text


@pytest.mark.parametrize("name, layer", [
    ("model.layers.7.mlp.experts.12.w", 7), ("lm_head.weight", None), ("h.0.w", 0), ("0.weight", None),
    ("layer3.w", None)])
def test_the_layer_of_a_name_is_its_first_whole_number(name, layer):
    assert layer_of(name) == layer


def test_layers_collapse_and_a_single_name_stays_as_it_is():
    names = ["model.layers.0.wk.weight", "lm_head.weight", "model.layers.1.wk.weight", "model.layers.3.wk.weight"]
    assert collapse(names) == [("model.layers.{0..1,3}.wk.weight", 3), ("lm_head.weight", 1)]
    assert collapse(["model.layers.5.wk.weight"]) == [("model.layers.5.wk.weight", 1)]


def test_every_number_position_collapses_by_itself():
    names = [f"layers.{layer}.experts.{expert}.w" for layer in (3, 4) for expert in range(256)]
    assert collapse(names) == [("layers.{3..4}.experts.{0..255}.w", 512)]


def test_names_of_different_parameters_are_kept_apart_in_order_of_appearance():
    assert collapse(["layers.0.b", "layers.0.a", "layers.1.b"]) == [("layers.{0..1}.b", 2), ("layers.0.a", 1)]
    assert collapse([]) == []
