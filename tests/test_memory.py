"""Memory knows, byte by byte, which delivery each storage holds; a per-element numpy array is the oracle."""

import gc

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from loadlens.inside import memory as memory_module
from loadlens.inside.memory import Memory, byte_range

CONSTANT = {-1}


def content(memory: Memory, t: torch.Tensor) -> list[tuple[int, int, set[int]]]:
    return [(first, last, set(leaves)) for first, last, leaves in memory.content(t)]


# --- against the oracle


@st.composite
def views(draw, elements):
    """A view of a flat tensor, as (size, stride, offset): a slice, or a block of columns, transposed or not."""
    kind = draw(st.sampled_from(["slice", "columns", "transposed"]))
    if kind == "slice":
        first = draw(st.integers(0, elements))
        return (draw(st.integers(0, elements - first)),), (1,), first
    width = draw(st.integers(1, 8))
    rows = draw(st.integers(1, elements // width))
    first = draw(st.integers(0, width - 1))
    columns = draw(st.integers(1, width - first))
    offset = first + width * draw(st.integers(0, elements // width - rows))
    if kind == "columns":
        return (rows, columns), (width, 1), offset
    return (columns, rows), (1, width), offset


ELEMENTS = 64
WRITES = st.lists(st.tuples(st.sampled_from("ab"), views(ELEMENTS)), max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.uint8])


@settings(max_examples=300, deadline=None)
@given(WRITES, views(ELEMENTS), DTYPES)
def test_any_writes_into_two_storages_read_back_as_the_oracle_has_them(writes, looked_at, dtype):
    memory = Memory()
    tensors = {name: torch.zeros(ELEMENTS, dtype=dtype) for name in "ab"}
    oracle = {name: np.full(ELEMENTS, -1) for name in "ab"}
    for delivery, (name, view) in enumerate(writes):
        memory.write(tensors[name].as_strided(*view), memory.delivery(delivery))
        size, stride, offset = view
        at = torch.arange(ELEMENTS).as_strided(size, stride, offset).flatten().numpy()
        oracle[name][at] = delivery
    for name, t in tensors.items():
        read = np.full(ELEMENTS, -99)
        for first, last, leaves in memory.content(t):
            (read[first:last],) = leaves
        assert read.tolist() == oracle[name].tolist()
        size, stride, offset = looked_at
        first, last = (n // t.element_size() for n in byte_range(t.as_strided(*looked_at)))
        part = t[first:last]
        expected = set(oracle[name][first:last].tolist())
        assert set().union(*(leaves for _, _, leaves in memory.content(part))) == expected
        node = memory.node(part) if part.numel() else None
        assert (memory.leaves(node) if node is not None else set()) - CONSTANT == expected - CONSTANT


@settings(max_examples=200, deadline=None)
@given(WRITES, st.integers(0, 48), st.integers(0, 48), st.integers(1, 16), DTYPES, DTYPES)
def test_a_move_carries_every_boundary_even_from_one_dtype_to_another(writes, source, target, count, from_, to):
    memory, oracle = Memory(), np.full(ELEMENTS, -1)
    src, dst = torch.zeros(ELEMENTS, dtype=from_), torch.zeros(ELEMENTS, dtype=to)
    for delivery, (_, view) in enumerate(writes):
        memory.write(src.as_strided(*view), memory.delivery(delivery))
        oracle[torch.arange(ELEMENTS).as_strided(*view).flatten().numpy()] = delivery
    before = memory.unwritten("the target")
    memory.set_all(dst, before)
    assert memory.move(dst[target : target + count], src[source : source + count])
    expected = np.full(ELEMENTS, -2)
    expected[target : target + count] = oracle[source : source + count]
    read = np.full(ELEMENTS, -99)
    for first, last, leaves in memory.content(dst):
        (read[first:last],) = leaves
    assert read.tolist() == expected.tolist()


# --- one by one


def test_a_storage_of_which_nothing_is_known_holds_a_constant_and_no_delivery():
    memory, t = Memory(), torch.zeros(8)
    assert content(memory, t) == [(0, 8, CONSTANT)]
    memory.write(t[2:4], memory.delivery(0))
    assert content(memory, t) == [(0, 2, CONSTANT), (2, 4, {0}), (4, 8, CONSTANT)]


def test_a_value_made_from_two_deliveries_has_both_leaves_and_a_third_joins_them():
    memory = Memory()
    pair = memory.join(memory.delivery(0), memory.delivery(1))
    assert memory.leaves(pair) == {0, 1}
    assert memory.join(pair, pair) == pair and memory.join(None, pair) == pair == memory.join(pair, None)
    assert memory.leaves(memory.join(pair, memory.delivery(2))) == {0, 1, 2}
    assert memory.leaves(pair) == {0, 1}


def test_a_join_is_made_once_however_often_it_is_asked_for():
    memory = Memory()
    a, b = memory.delivery(0), memory.delivery(1)
    assert memory.join(a, b) == memory.join(b, a)
    assert len(memory.parents) == 4  # the constant, two deliveries, their join


def test_the_extra_input_of_a_move_joins_every_piece():
    memory, src, dst = Memory(), torch.zeros(4), torch.zeros(4)
    memory.write(src[:2], memory.delivery(0))
    memory.write(src[2:], memory.delivery(1))
    memory.move(dst, src, memory.delivery(2))
    assert content(memory, dst) == [(0, 2, {0, 2}), (2, 4, {1, 2})]


def test_a_move_between_tensors_that_do_not_line_up_is_refused_and_changes_nothing():
    memory, src, dst = Memory(), torch.zeros(4, 4), torch.zeros(4, 4)
    memory.write(src, memory.delivery(0))
    assert not memory.move(dst[:2], src)
    assert not memory.move(dst, src.t())
    assert content(memory, dst) == [(0, 16, CONSTANT)]


def test_an_element_of_which_one_byte_is_written_otherwise_belongs_to_both():
    memory, t = Memory(), torch.zeros(4)
    memory.write(t, memory.delivery(0))
    memory.write(t.view(torch.uint8)[5:6], memory.delivery(1))
    covered = [(first, last) for first, last, leaves in memory.content(t) if 1 in leaves]
    assert covered == [(1, 2)]


def test_a_strided_write_of_too_many_runs_is_said_to_be_imprecise_and_keeps_what_was_there(monkeypatch):
    monkeypatch.setattr(memory_module, "MAX_RUNS", 4)
    memory, few, many = Memory(), torch.zeros(4, 4), torch.zeros(5, 4)
    for t in (few, many):
        memory.write(t, memory.delivery(0))
        memory.write(t[:, :1], memory.delivery(1))
    assert memory.imprecise == {memory.pin(many)}
    assert content(memory, few)[:2] == [(0, 1, {1}), (1, 4, {0})]
    assert content(memory, many) == [(0, 17, {0, 1}), (17, 20, {0})]


def test_the_address_of_freed_memory_is_not_taken_for_the_storage_that_was_there():
    memory = Memory()
    for delivery in range(50):
        t = torch.zeros(16)
        assert content(memory, t) == [(0, 16, CONSTANT)], delivery
        memory.write(t, memory.delivery(delivery))
        assert content(memory, t) == [(0, 16, {delivery})]


def test_a_storage_that_nothing_holds_has_expired():
    memory, t = Memory(), torch.zeros(4)
    storage = memory.pin(t)
    assert not memory.expired(storage)
    del t
    gc.collect()
    assert memory.expired(storage)


@pytest.mark.parametrize("shape", [(0,), (0, 4), ()])
def test_empty_tensors_and_scalars(shape):
    memory, t = Memory(), torch.zeros(shape)
    memory.write(t, memory.delivery(0))
    assert content(memory, t) == ([(0, 1, {0})] if shape == () else [])


def test_meta_tensors_have_storages_too():
    memory = Memory()
    one, other = torch.empty(8, device="meta"), torch.empty(8, device="meta")
    memory.write(one[2:], memory.delivery(0))
    assert content(memory, one) == [(0, 2, CONSTANT), (2, 8, {0})]
    assert content(memory, other) == [(0, 8, CONSTANT)]
