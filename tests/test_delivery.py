"""Each delivery is an order and a cut of the checkpoint's names; every malformed one is refused with the grammar."""

from pathlib import Path

import pytest

from loadlens.checkpoint import Checkpoint, TensorInfo
from loadlens.delivery import GRAMMAR, ORDERS, Delivery
from loadlens.errors import CannotRun

# name, file; in the order of their bytes. Scales (F32) lie first, as safetensors lays them out.
TWO_FILES = [("b.scale", "1"), ("c.weight", "1"), ("b.weight", "1"), ("d.weight", "2"), ("a.weight", "2")]
STATE_DICT = ("c.weight", "b.weight", "b.scale", "a.weight", "d.weight")


def checkpoint(tensors=TWO_FILES, state_dict_order=STATE_DICT) -> Checkpoint:
    infos = tuple(TensorInfo(name, "U8", (1,), file, at, at + 1) for at, (name, file) in enumerate(tensors))
    return Checkpoint("tiny", Path("tiny"), {"architectures": ["X"]}, infos, state_dict_order)


CALLS = {
    "sorted": [("b.scale", "b.weight", "c.weight", "a.weight", "d.weight")],
    "file": [("b.scale", "c.weight", "b.weight", "d.weight", "a.weight")],
    "state-dict": [STATE_DICT],
    "per-tensor": [("b.scale",), ("b.weight",), ("c.weight",), ("a.weight",), ("d.weight",)],
    "per-file": [("b.scale", "b.weight", "c.weight"), ("a.weight", "d.weight")],
    "split:c.weight": [("b.scale", "b.weight", "c.weight"), ("a.weight", "d.weight")],
    "runai": [],
}


@pytest.mark.parametrize("name, calls", CALLS.items())
def test_the_calls_of_a_delivery(name, calls):
    assert list(Delivery.parse(name).calls(checkpoint())) == calls


def test_every_order_is_tested_here():
    assert {name.partition(":")[0] for name in CALLS} | {"shuffled"} == set(ORDERS)


@pytest.mark.parametrize("name", [*(n for n in CALLS if n != "runai"), "shuffled:0", "shuffled:7"])
def test_a_delivery_brings_every_tensor_once(name):
    calls = Delivery.parse(name).calls(checkpoint())
    assert sorted(n for call in calls for n in call) == sorted(checkpoint().names)


def test_a_seed_gives_one_order_and_another_seed_another():
    one, again, other = (Delivery.parse(f"shuffled:{seed}").calls(checkpoint()) for seed in (1, 1, 2))
    assert one == again != other and len(one) == 1
    # whatever the order of the bytes: a seed means the same for the same names
    assert Delivery.parse("shuffled:1").calls(checkpoint(TWO_FILES[::-1])) == one


def test_a_split_after_the_last_tensor_is_one_call():
    assert len(Delivery.parse("split:d.weight").calls(checkpoint())) == 1


@pytest.mark.parametrize("name", ["sorted", "shuffled:12", "split:a:b.weight", "runai"])
@pytest.mark.parametrize("reused", [False, True])
def test_a_delivery_is_written_as_it_is_read(name, reused):
    text = name + ",reused-buffer" * reused
    delivery = Delivery.parse(text)
    assert str(delivery) == text and delivery.reused_buffer is reused
    assert Delivery.parse(delivery) is delivery
    assert Delivery.parse(text.replace(",", " , ")) == delivery


def test_the_order_is_the_same_with_a_reused_buffer():
    assert Delivery.parse("file,reused-buffer").calls(checkpoint()) == Delivery.parse("file").calls(checkpoint())


@pytest.mark.parametrize("name, sentence", [
    ("sorted", "one call, sorted by name within each file"),
    ("file", "one call, in file order"),
    ("state-dict", "one call, in state-dict order"),
    ("per-file", "one call per file, sorted by name"),
    ("shuffled:3", "one call, shuffled with seed 3"),
    ("split:x.y", "two calls, sorted, cut after x.y"),
    ("runai", "through vLLM's own Run:ai streamer"),
    ("per-tensor,reused-buffer", "one call per tensor, sorted by name, out of one reused buffer"),
])
def test_a_delivery_in_words(name, sentence):
    assert Delivery.parse(name).sentence == sentence


@pytest.mark.parametrize("name", [
    "", "alphabetic", "Sorted", "sorted:1", "file:", "shuffled", "shuffled:", "split", "sorted,", "sorted,other",
    "sorted,reused-buffer,reused-buffer", ",reused-buffer", "reused-buffer", "sorted\nfile"])
def test_no_such_delivery_shows_the_grammar(name):
    with pytest.raises(CannotRun) as refused:
        Delivery.parse(name)
    assert str(refused.value) == f"there is no delivery {name!r}; choose {GRAMMAR}"


def assert_refused(delivery: str, sentence: str, ck: Checkpoint | None = None) -> None:
    with pytest.raises(CannotRun) as refused:
        Delivery.parse(delivery).calls(ck or checkpoint())
    assert str(refused.value) == sentence


@pytest.mark.parametrize("seed", ["x", "-1", "1.5", "²", "9" * 5000])
def test_a_seed_is_a_whole_number(seed):
    said = f"shuffled needs a whole number as its seed, not {seed!r}; write for example shuffled:1"
    assert_refused(f"shuffled:{seed}", said)


def test_a_split_needs_a_tensor_of_the_checkpoint():
    assert_refused("split:x", "tiny has no tensor 'x' to split after; choose one that it has")


def test_a_state_dict_order_must_be_known():
    said = ("tiny does not say its state-dict order; put state_dict.json (a list of all tensor names) "
            "beside config.json, or choose another delivery")
    assert_refused("state-dict", said, checkpoint(state_dict_order=None))
