"""The recorder sees what a model did with each delivered tensor; every hazard is a tiny model named after it."""

import ctypes
import threading

import numpy as np
import pytest
import torch
from torch import nn

from loadlens.inside import record
from loadlens.inside.record import EVENT_KINDS, Recorder, poison
from loadlens.laws import FAIL, PASS, judge

ROWS, COLUMNS = 8, 6
SIZE = ROWS * COLUMNS


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that no poison and no zero can be taken for."""
    shape = shape or (ROWS, COLUMNS)
    return torch.arange(1, 1 + int(np.prod(shape))).reshape(shape).to(dtype)


class Model(nn.Module):
    """One parameter of 8 x 6, loaded as vLLM's models are; what `take` does with a tensor is the hazard."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(ROWS, COLUMNS), requires_grad=False)

    def load_weights(self, weights) -> None:
        for _, t in weights:
            self.take(t)

    def take(self, t: torch.Tensor) -> None:
        self.a.data.copy_(t)


class Loaded:
    """What is known after a model was loaded."""

    def __init__(self, model: nn.Module, *tensors: torch.Tensor, device: str = "cpu", producer=None) -> None:
        for p in model.parameters():
            poison(p, 0xFF)
        self.model, self.recorder = model, Recorder(model, device=device)
        names = "abcdefgh" if tensors else "a"
        with self.recorder.watching():
            model.load_weights(producer() if producer else zip(names, tensors or (values(),)))
        self.report = self.recorder.report()
        self.laws = judge(self.report | dict(error=None, stage="done", layout={}, digests={}), None)

    def __getitem__(self, name: str) -> dict:
        return next(p for p in self.report["parameters"] if p["name"] == name)

    @property
    def spans(self) -> list:
        return [(first, last, what, set(ids)) for first, last, what, ids in self["a"]["spans"]]

    @property
    def fates(self) -> list[str]:
        return self.report["deliveries"]["fate"]

    @property
    def events(self) -> list[tuple]:
        """(source, offset, elements, kind, stale) of every write."""
        c = self.recorder.event_columns()
        rows = zip(c["source"], c["offset"], c["elements"], c["kind"], c["stale"])
        return [(int(s), int(o), int(e), EVENT_KINDS[k], int(x)) for s, o, e, k, x in rows]

    def says(self, law: str) -> str:
        return f"{self.laws[law].outcome}: {self.laws[law].sentence}"


def assert_whole(loaded: Loaded, *deliveries: int) -> None:
    """The parameter's every element comes from these deliveries, memory agrees, and nothing was lost."""
    assert loaded.spans == [(0, SIZE, "written", set(deliveries or (0,)))]
    assert (loaded["a"]["written"], loaded["a"]["poisoned"], loaded["a"]["imprecise"]) == (SIZE, 0, False)
    assert loaded.says("L2") == f"PASS: all {SIZE} elements were written from the checkpoint; no poison left in memory"
    assert loaded.laws["L3"].outcome == PASS


def assert_unsure(loaded: Loaded) -> None:
    assert loaded.says("L2") == "UNRESOLVED: the recorder and the memory disagree, or an extent is unknown: a"


def take(body):
    """Make a model class out of what it does with one tensor."""
    return type(body.__name__, (Model,), dict(take=body, __doc__=body.__doc__))


# --- what is coverage, and what is not


def test_a_model_that_copies_what_it_is_given_is_whole():
    loaded = Loaded(Model())
    assert_whole(loaded)
    assert loaded.events == [(0, 0, SIZE, "copy", -1)]
    assert loaded.report["calls"] == [dict(id=0, parent=-1, round=0, module="", cls="Model", entered=1, left=4,
                                           tensors=1, first=0, last=0)]


@take
def FillsWithZeros(self, t):
    self.a.data.zero_()


@take
def FillsWithAConstant(self, t):
    self.a.data.fill_(1.0)


@take
def ReplacesItselfByZeros(self, t):
    self.a = nn.Parameter(torch.zeros(ROWS, COLUMNS), requires_grad=False)


@take
def CopiesZeros(self, t):
    self.a.data.copy_(torch.zeros(ROWS, COLUMNS))


@pytest.mark.parametrize("hazard", [FillsWithZeros, FillsWithAConstant, ReplacesItselfByZeros, CopiesZeros])
def test_a_constant_is_not_coverage(hazard):
    loaded = Loaded(hazard())
    assert loaded.spans == [(0, SIZE, "constant", set())]
    assert loaded.says("L2") == f"FAIL: {SIZE} of {SIZE} elements were not written from the checkpoint: a"
    assert loaded.laws["L2"].findings[0].why == "filled with a constant, not from the checkpoint"
    assert loaded.fates == ["lost"]


@take
def CopiesUninitializedMemory(self, t):
    self.a.data.copy_(torch.empty(ROWS, COLUMNS))


@take
def CopiesUninitializedMemoryOverItsWeights(self, t):
    """What a layerwise reload that lost its tensors does."""
    self.a.data.copy_(t)
    self.a.data.copy_(torch.empty_like(self.a))


@take
def IsMadeAnewAndNeverWritten(self, t):
    self.a = nn.Parameter(torch.empty_like(self.a), requires_grad=False)


@pytest.mark.parametrize("hazard", [CopiesUninitializedMemory, CopiesUninitializedMemoryOverItsWeights,
                                    IsMadeAnewAndNeverWritten])
def test_content_that_nobody_wrote_is_not_coverage_though_it_was_copied(hazard):
    loaded = Loaded(hazard())
    assert loaded.spans == [(0, SIZE, "unwritten", set())]
    assert loaded["a"]["poisoned"] == SIZE
    assert loaded.says("L2") == f"FAIL: {SIZE} of {SIZE} elements were not written from the checkpoint: a"
    assert loaded.laws["L2"].findings[0].why == "never written"


def test_a_tensor_that_was_written_and_then_overwritten_is_not_lost():
    assert Loaded(CopiesUninitializedMemoryOverItsWeights()).fates == ["overwritten"]
    assert Loaded(Model(), values(), values()).fates == ["overwritten", "written"]


@take
def HandsOverHalfOfAnUninitializedTensor(self, t):
    half = torch.cat([t[:4], torch.empty(4, COLUMNS)])
    self.a.data.copy_(half)


@take
def ClonesAHalfWrittenTensor(self, t):
    half = torch.empty(ROWS, COLUMNS)
    half[:4] = t[:4]
    self.a.data.copy_((half.clone().to(torch.bfloat16) * 2).reshape(ROWS, COLUMNS))


@take
def ReshapesAHalfWrittenTensor(self, t):
    half = torch.empty(ROWS, COLUMNS)
    half[:4] = t[:4]
    self.a.data.view(-1).copy_(half.view(ROWS, COLUMNS).reshape(-1))


@pytest.mark.parametrize("hazard", [HandsOverHalfOfAnUninitializedTensor, ClonesAHalfWrittenTensor,
                                    ReshapesAHalfWrittenTensor])
def test_half_of_a_copied_tensor_was_never_written(hazard):
    loaded = Loaded(hazard())
    assert loaded.spans == [(0, 24, "written", {0}), (24, 48, "unwritten", set())]
    if hazard is not ClonesAHalfWrittenTensor:  # twice a NaN is a NaN, but not the same one
        assert loaded["a"]["poisoned"] == 24
        assert loaded.says("L2") == "FAIL: 24 of 48 elements were not written from the checkpoint: a"


@take
def HalfComesFromZeros(self, t):
    padded = torch.zeros(ROWS, COLUMNS)
    padded[:4] = t[:4]
    self.a.data.copy_(padded)


def test_half_of_a_padded_tensor_is_a_constant():
    loaded = Loaded(HalfComesFromZeros())
    assert loaded.spans == [(0, 24, "written", {0}), (24, 48, "constant", set())]
    assert loaded.says("L2") == "FAIL: 24 of 48 elements were not written from the checkpoint: a"


@take
def WritesItsLowerHalf(self, t):
    self.a.data.narrow(0, 4, 4).copy_(t[4:])


@take
def WritesColumnsTwoToFour(self, t):
    self.a.data.narrow(1, 2, 3).copy_(t[:, :3])


def test_a_half_written_parameter_is_known_to_the_element():
    loaded = Loaded(WritesItsLowerHalf())
    assert loaded.spans == [(0, 24, "unwritten", set()), (24, 48, "written", {0})]
    assert loaded.events == [(0, 24, 24, "copy", -1)]
    (finding,) = loaded.laws["L2"].findings
    assert (finding.parameter, finding.elements, finding.of, finding.when) == ("a", 24, 48, "from element 0")


def test_strided_writes_are_known_to_the_element():
    loaded = Loaded(WritesColumnsTwoToFour())
    at = np.zeros((ROWS, COLUMNS), int)
    at[:, 2:5] = 1
    read = np.zeros(SIZE, int)
    for first, last, what, _ in loaded.spans:
        read[first:last] = what == "written"
    assert read.tolist() == at.flatten().tolist()
    assert (loaded["a"]["written"], loaded["a"]["unwritten"], loaded["a"]["poisoned"]) == (24, 24, 24)
    assert loaded.events == [(0, 2, 24, "strided copy", -1)]


@take
def WritesRowsThreeAndFourTwice(self, t):
    self.a.data[0:5].copy_(t[0:5])
    self.a.data[3:8].copy_(t[3:8])


def test_elements_written_twice_are_counted():
    loaded = Loaded(WritesRowsThreeAndFourTwice())
    assert_whole(loaded)
    assert loaded["a"]["twice"] == 2 * COLUMNS
    assert Loaded(Model())["a"]["twice"] == 0


@take
def StartsFromZeros(self, t):
    self.a.data.copy_(torch.zeros(ROWS, COLUMNS).fill_(0))
    self.a.data.copy_(t)


def test_a_constant_that_is_overwritten_is_no_double_write():
    loaded = Loaded(StartsFromZeros())
    assert_whole(loaded)
    assert loaded["a"]["twice"] == 0


def test_the_same_weights_in_a_second_round_are_no_double_write():
    model = Model()
    recorder = Recorder(model, device="cpu")
    with recorder.watching():
        model.load_weights([("a", values())])
        recorder.round = 1
        model.load_weights([("a", values())])
    report = recorder.report()
    assert [p["twice"] for p in report["parameters"]] == [0]
    assert report["deliveries"]["round"] == [0, 1]


# --- provenance through what loaders do to a tensor


@take
def Clones(self, t):
    self.a.data.copy_(t.clone())


@take
def CastsAndScales(self, t):
    self.a.data.copy_((t.to(torch.float16).to(torch.float32) * 2).to(torch.bfloat16))


@take
def WritesTransposed(self, t):
    self.a.data.t().copy_(t.t())


@take
def WritesASlice(self, t):
    self.a.data[:] = t


@take
def CopiesForeach(self, t):
    torch._foreach_copy_([self.a.data], [t])


@take
def ComputesStraightIntoIt(self, t):
    torch.mul(t, 2, out=self.a.data)


@take
def AddsToZeros(self, t):
    self.a.data.zero_()
    self.a.data.add_(t)


@take
def SwapsItsData(self, t):
    self.a.data = t


@take
def SwapsItsDataForADerivedTensor(self, t):
    self.a.data = t * 2


@take
def IsReplacedByAParameter(self, t):
    self.a = nn.Parameter(t.clone(), requires_grad=False)


@take
def IsReplacedBehindModulesBack(self, t):
    self._parameters["a"] = nn.Parameter(t.clone(), requires_grad=False)


@take
def SetsItsStorage(self, t):
    self.a.set_(t)


@take
def CopiesInInferenceMode(self, t):
    with torch.inference_mode():
        self.a.data.copy_(t)


@take
def SplitsAndStacks(self, t):
    self.a.data.copy_(torch.stack(t.unbind(0)))


@pytest.mark.parametrize("way", [
    Clones, CastsAndScales, WritesTransposed, WritesASlice, CopiesForeach, ComputesStraightIntoIt, AddsToZeros,
    SwapsItsData, SwapsItsDataForADerivedTensor, IsReplacedByAParameter, IsReplacedBehindModulesBack, SetsItsStorage,
    CopiesInInferenceMode, SplitsAndStacks])
def test_every_way_to_write_a_parameter_is_seen(way):
    assert_whole(Loaded(way()))


@pytest.mark.parametrize("way", [IsReplacedByAParameter, IsReplacedBehindModulesBack, SwapsItsData])
def test_a_replaced_parameter_is_an_event(way):
    assert Loaded(way()).events == [(0, 0, SIZE, "replaced", -1)]


class DequantizesBlocks(Model):
    """An FP8 weight and its scales of 4 x 3 blocks become one parameter."""

    def load_weights(self, weights) -> None:
        weight, scale = (t for _, t in weights)
        full = scale.repeat_interleave(4, 0).repeat_interleave(3, 1)
        self.a.data.copy_(weight.to(torch.float32) * full)


def test_a_dequantized_parameter_comes_from_the_weight_and_its_scale():
    loaded = Loaded(DequantizesBlocks(), values().to(torch.float8_e4m3fn), values(2, 2))
    assert_whole(loaded, 0, 1)


class WritesThroughItsTwin(Model):
    """Two names for one parameter, as an embedding and a tied lm_head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(COLUMNS, ROWS, bias=False)
        self.head.weight = self.a

    def take(self, t) -> None:
        self.head.weight.data.copy_(t)


def test_tied_weights_are_one_parameter_with_two_names():
    loaded = Loaded(WritesThroughItsTwin())
    assert_whole(loaded)
    assert [(p["name"], p["aliases"]) for p in loaded.report["parameters"]] == [("a", ["head.weight"])]


class KeepsWritingToAReplacedParameter(Model):
    """The names are looked up once a call, as models do; the parameter is replaced after that."""

    def load_weights(self, weights) -> None:
        params = dict(self.named_parameters())
        self.a = nn.Parameter(torch.empty_like(self.a), requires_grad=False)
        for name, t in weights:
            params[name].data.copy_(t)


def test_a_write_to_a_parameter_that_was_replaced_covers_nothing():
    loaded = Loaded(KeepsWritingToAReplacedParameter())
    assert loaded.spans == [(0, SIZE, "unwritten", set())]
    assert loaded.fates == ["orphaned"]
    assert loaded.says("L2") == "FAIL: 48 of 48 elements were not written from the checkpoint: a"
    assert loaded.says("L3") == "FAIL: 1 of 1 delivered tensors were lost: a"


class WritesABuffer(Model):
    """A checkpoint may hold a buffer, and a buffer that no checkpoint holds is a constant of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.ones(3))

    def take(self, t) -> None:
        (self.steps if t.numel() == 3 else self.a.data).copy_(t)


def test_a_buffer_takes_a_tensor_and_need_not():
    assert Loaded(WritesABuffer(), values(), values(3)).fates == ["written", "written"]
    assert_whole(Loaded(WritesABuffer()))


# --- what the recorder can't follow, and says so


@take
def WritesRowsByIndex(self, t):
    self.a.data[torch.arange(ROWS)] = t


@take
def WritesTwoRowsByIndex(self, t):
    self.a.data[torch.tensor([1, 5])] = t[:2]


def test_an_extent_that_depends_on_values_is_unresolved_and_not_guessed():
    loaded = Loaded(WritesRowsByIndex())
    assert loaded["a"]["imprecise"]
    assert_unsure(loaded)


def test_an_extent_that_depends_on_values_is_unresolved_on_meta_too():
    with torch.device("meta"):
        model, t = Model(), torch.empty(ROWS, COLUMNS)
        model.take = lambda t: model.a.data.index_copy_(0, torch.arange(ROWS), t)
        assert_unsure(Loaded(model, t, device="meta"))


def test_poison_that_is_still_there_is_a_failure_however_imprecise_the_record():
    loaded = Loaded(WritesTwoRowsByIndex())
    assert loaded["a"]["poisoned"] == SIZE - 2 * COLUMNS
    assert loaded.says("L2") == "FAIL: 36 of 48 elements were not written from the checkpoint: a"


@take
def WritesThroughNumpy(self, t):
    self.a.data.numpy()[:] = t.numpy()


@take
def WritesThroughMemmove(self, t):
    ctypes.memmove(self.a.data_ptr(), t.data_ptr(), t.nbytes)


@take
def WritesInAnotherThread(self, t):
    thread = threading.Thread(target=lambda: self.a.data.copy_(t))
    thread.start()
    thread.join()


@pytest.mark.parametrize("invisible", [WritesThroughNumpy, WritesThroughMemmove, WritesInAnotherThread])
def test_a_write_past_the_dispatcher_is_unresolved_because_the_poison_is_gone(invisible):
    loaded = Loaded(invisible())
    assert (loaded["a"]["unwritten"], loaded["a"]["poisoned"]) == (SIZE, 0)
    assert_unsure(loaded)


@take
def SpoilsItsWeightsThroughNumpy(self, t):
    self.a.data.copy_(t)
    self.a.data.numpy().view(np.uint8)[:] = 0xFF


def test_poison_where_the_recorder_saw_a_write_is_unresolved():
    loaded = Loaded(SpoilsItsWeightsThroughNumpy())
    assert (loaded["a"]["unwritten"], loaded["a"]["poisoned"]) == (0, SIZE)
    assert_unsure(loaded)


# --- what becomes of a tensor


KEPT: list = []


@pytest.fixture(autouse=True)
def nothing_kept():
    KEPT.clear()
    yield
    KEPT.clear()


@take
def DropsIt(self, t):
    pass


@take
def OnlyComputesWithIt(self, t):
    t * 2


@take
def KeepsIt(self, t):
    KEPT.append(t)


@take
def KeepsAViewOfIt(self, t):
    KEPT.append(t[1:])


@take
def KeepsSomethingMadeOfIt(self, t):
    KEPT.append(t * 2)


@take
def ReadsItAsANumber(self, t):
    self.a.data.fill_(t[0, 0].item())


@pytest.mark.parametrize("model, fate", [
    (DropsIt, "lost"), (OnlyComputesWithIt, "lost"), (KeepsIt, "held"), (KeepsAViewOfIt, "held"),
    (KeepsSomethingMadeOfIt, "held"), (ReadsItAsANumber, "scalar"), (Model, "written")])
def test_the_fate_of_a_tensor(model, fate):
    loaded = Loaded(model())
    assert loaded.fates == [fate]
    assert loaded.report["held_bytes"] == (SIZE * 4 if model in (KeepsIt, KeepsAViewOfIt) else 0)


def test_a_lost_tensor_and_one_that_is_still_held_are_told_apart():
    assert Loaded(DropsIt()).laws["L3"].findings[0].why == "dropped without being written"
    for hazard in (KeepsIt, KeepsSomethingMadeOfIt):
        assert Loaded(hazard()).laws["L3"].findings[0].why == "still held at the end of the load, and never used"


class Park(nn.Module):
    """A part of a model that parks what it can't use yet in a local dict: vllm#46078 in eight lines."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(ROWS, COLUMNS), requires_grad=False)

    def load_weights(self, weights) -> None:
        parked = {}
        for name, t in weights:
            parked[name] = t
            if len(parked) == 2:
                self.w.data.copy_(parked.pop("weight") * parked.pop("scale"))


class CallsItsPartOncePerRun(nn.Module):
    """An outer load_weights that hands consecutive names to its part, as AutoWeightsLoader does."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Park()
        self.head = nn.Parameter(torch.empty(3), requires_grad=False)

    def load_weights(self, weights) -> None:
        run = []
        for name, t in weights:
            if name == "head":
                self.part.load_weights(iter(run))
                run = []
                self.head.data.copy_(t)
            else:
                run.append((name, t))
        self.part.load_weights(iter(run))


@pytest.mark.parametrize("order, fates", [
    (("scale", "head", "weight"), ["lost", "written", "lost"]),
    (("scale", "weight", "head"), ["written", "written", "written"])])
def test_a_pair_is_lost_when_one_outer_call_becomes_two_inner_calls_between_its_halves(order, fates):
    tensors = dict(scale=values(1), weight=values(), head=values(3))
    loaded = Loaded(CallsItsPartOncePerRun(), producer=lambda: ((n, tensors[n]) for n in order))
    assert loaded.fates == fates
    inner = [c for c in loaded.report["calls"] if c["cls"] == "Park"]
    assert [(c["parent"], c["tensors"]) for c in inner] == ([(0, 1), (0, 1)] if "lost" in fates else [(0, 2), (0, 0)])
    if "lost" in fates:
        assert loaded.laws["L3"].findings[0].why == "its last reference died when Park.load_weights returned"
        assert loaded.says("L2") == "FAIL: 48 of 51 elements were not written from the checkpoint: part.w"


# --- buffers that are shared, packed or used again


def test_tensors_packed_into_one_buffer_are_told_apart():
    class WritesTheHalves(Model):
        def load_weights(self, weights) -> None:
            for at, (_, t) in enumerate(weights):
                self.a.data[4 * at : 4 * at + 4].copy_(t)

    packed = values(SIZE)
    loaded = Loaded(WritesTheHalves(), packed[:24].view(4, 6), packed[24:].view(4, 6))
    assert loaded.spans == [(0, 24, "written", {0}), (24, 48, "written", {1})]
    assert not loaded.report["stale"]


def through_one_buffer(*tensors):
    """A producer that overwrites its one buffer after each tensor."""
    buffer = torch.empty(max(t.numel() for t in tensors))
    for name, t in zip("abcdefgh", tensors):
        buffer[: t.numel()] = t.flatten()
        yield name, buffer[: t.numel()].view(t.shape)
        buffer.fill_(-1)


class ReadsTheFirstAfterTheSecondCame(Model):
    """Keeps a reference instead of a copy, as online quantization does with delivered tensors."""

    def load_weights(self, weights) -> None:
        (_, first), (_, _) = weights
        self.a.data.copy_(first)


class CopiesTheFirstBeforeTheSecondCame(Model):
    """The negative control."""

    def load_weights(self, weights) -> None:
        weights = iter(weights)
        self.a.data.copy_(next(weights)[1])
        next(weights)


def test_a_read_of_a_buffer_that_holds_something_else_by_now_is_stale_and_says_what_was_meant():
    two = values(), values() + 100
    loaded = Loaded(ReadsTheFirstAfterTheSecondCame(), producer=lambda: through_one_buffer(*two))
    (stale,) = loaded.report["stale"]
    assert (stale["delivery"], stale["holds"], stale["op"], stale["call"]) == (0, [1], "aten.copy_.default", 0)
    assert loaded.events == [(1, 0, SIZE, "copy", 0)]  # it wrote delivery 1 where delivery 0 was meant
    assert loaded.spans == [(0, SIZE, "written", {1})]
    assert torch.all(loaded.model.a == -1)

    control = Loaded(CopiesTheFirstBeforeTheSecondCame(), producer=lambda: through_one_buffer(*two))
    assert control.report["stale"] == [] and control.fates == ["written", "lost"]
    assert torch.equal(control.model.a, two[0])


def test_a_tensor_of_its_own_is_never_stale_however_late_it_is_read():
    assert Loaded(ReadsTheFirstAfterTheSecondCame(), values(), values()).report["stale"] == []


def test_a_list_of_all_tensors_first_is_no_stale_read_when_each_has_its_own_memory():
    class ListsFirst(Model):
        def load_weights(self, weights) -> None:
            for _, t in list(weights):
                self.take(t)

    loaded = Loaded(ListsFirst(), values(), values() + 1)
    assert loaded.report["stale"] == [] and loaded.fates == ["overwritten", "written"]
    assert loaded.report["peak_bytes"] == 2 * SIZE * 4


# --- time and memory


def test_lifetimes_are_counted_in_ticks():
    class LetsGoAtOnce(Model):
        def load_weights(self, weights) -> None:
            for _, t in weights:  # call entered: tick 1
                self.a.data.copy_(t)
                del t

    d = Loaded(LetsGoAtOnce(), values(), values()).report["deliveries"]
    # delivered at 2, copied at 3 and let go; the second at 4 and 5
    assert (d["born"], d["died"], d["died_in"]) == ([2, 4], [3, 5], [0, 0])
    d = Loaded(Model(), values(), values()).report["deliveries"]
    # a loop variable holds the first until the second has come
    assert (d["born"], d["died"]) == ([2, 4], [4, 5])
    d = Loaded(KeepsIt(), values()).report["deliveries"]
    assert (d["born"], d["died"], d["died_in"]) == ([2], [-1], [-1])


def test_peak_bytes_are_those_of_the_delivered_tensors_alive_at_once():
    class KeepsTheFirstTwo(Model):
        def load_weights(self, weights) -> None:
            kept = []
            for name, t in weights:
                kept.append(t)
                if name == "b":
                    kept.clear()
                del t

    report = Loaded(KeepsTheFirstTwo(), values(10), values(20), values(5), values(1)).report
    assert report["deliveries"]["nbytes"] == [40, 80, 20, 4]
    assert report["deliveries"]["alive"] == [40, 120, 20, 24]
    assert (report["peak_bytes"], report["total_bytes"], report["held_bytes"]) == (120, 144, 0)


# --- the recorder itself


def test_on_meta_there_is_coverage_without_bytes():
    with torch.device("meta"):
        healthy = Loaded(Model(), torch.empty(ROWS, COLUMNS), device="meta")
        half = Loaded(WritesItsLowerHalf(), torch.empty(ROWS, COLUMNS), device="meta")
    assert healthy.spans == [(0, SIZE, "written", {0})] and healthy["a"]["poisoned"] is None
    assert healthy.says("L2") == "PASS: all 48 elements were written from the checkpoint"
    assert half.spans == [(0, 24, "unwritten", set()), (24, 48, "written", {0})]
    assert half.says("L2") == "FAIL: 24 of 48 elements were not written from the checkpoint: a"


def test_a_write_to_a_placeholder_on_meta_is_no_write_of_a_model_on_a_device():
    class LoadsIntoAPlaceholder(Model):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.empty(ROWS, COLUMNS, device="meta"), requires_grad=False)

    loaded = Loaded(LoadsIntoAPlaceholder())
    assert [e[3] for e in loaded.events] == ["placeholder"]


def test_the_producers_own_work_is_not_recorded():
    def dequantizes():
        yield "a", torch.zeros(ROWS, COLUMNS).fill_(3) * 2

    loaded = Loaded(Model(), producer=dequantizes)
    assert_whole(loaded)
    assert loaded.report["events"] == 1


def test_the_model_is_let_go_of_afterwards_even_when_the_load_raises():
    class Raises(Model):
        def take(self, t) -> None:
            raise ValueError("no")

    for hazard in (Model, Raises):
        model = hazard()
        recorder = Recorder(model, device="cpu")
        hooks = len(nn.modules.module._global_parameter_registration_hooks)
        try:
            with recorder.watching():
                assert "load_weights" in vars(model)
                model.load_weights([("a", values())])
        except ValueError:
            assert hazard is Raises
        assert "load_weights" not in vars(model)
        assert len(nn.modules.module._global_parameter_registration_hooks) == hooks
        ticks = recorder.tick
        model.a.data.copy_(values())
        model.b = nn.Parameter(values())
        assert recorder.tick == ticks and "b" not in recorder.current


def test_without_watching_nothing_but_the_deliveries_is_recorded():
    model = Model()
    recorder = Recorder(model, device="cpu", watch=False)
    with recorder.watching():
        model.load_weights([("a", values())])
    report = recorder.report()
    assert report["deliveries"]["name"] == ["a"] and report["events"] == 0
    assert torch.equal(model.a, values())


def test_a_recorded_load_leaves_the_same_values_as_a_plain_one():
    recorded, plain = DequantizesBlocks(), DequantizesBlocks()
    pair = [("weight", values().to(torch.float8_e4m3fn)), ("scale", values(2, 2))]
    plain.load_weights(pair)
    loaded = Loaded(recorded, *(t for _, t in pair))
    assert torch.equal(loaded.model.a, plain.a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
                                   torch.float8_e5m2])
def test_poison_is_not_a_number_in_every_float_format_and_is_counted(dtype):
    t = torch.zeros(6, 4).to(dtype)
    for part in (t, t[1:3], t[:, 1:2]):
        t.copy_(torch.zeros(6, 4))
        poison(part, 0xFF)
        assert int(torch.isnan(t.float()).sum()) == part.numel() == record._still_poison(t, 0xFF)


def test_integers_are_poisoned_too_and_flags_are_left_alone():
    t = torch.zeros(3, dtype=torch.int32)
    poison(t, 0x7B)
    assert t.tolist() == [0x7B7B7B7B] * 3
    flags = torch.zeros(3, dtype=torch.bool)
    poison(flags, 0xFF)
    assert not flags.any()


class PaddedEmbedding(nn.Module):
    """What vLLM's vocabulary embedding says of itself: 6 rows of a checkpoint, 8 in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, COLUMNS), requires_grad=False)
        self.shard_indices = type("Shards", (), dict(num_org_elements=6, num_org_elements_padded=8))

    def load_weights(self, weights) -> None:
        for _, t in weights:
            self.weight.data[:6].copy_(t)
            self.weight.data[self.zeros_from :].fill_(0)


@pytest.mark.parametrize("zeros_from, padding, constant", [(6, 12, 0), (5, 0, 18)])
def test_declared_padding_is_no_hole_and_more_than_that_is(zeros_from, padding, constant):
    model = PaddedEmbedding()
    model.zeros_from = zeros_from
    loaded = Loaded(model, values(6, 6))
    p = loaded["weight"]
    assert (p["padding"], p["constant"]) == (padding, constant)
    assert loaded.laws["L2"].outcome == (PASS if zeros_from == 6 else FAIL)
    if zeros_from == 6:
        assert loaded.says("L2") == ("PASS: all 36 elements were written from the checkpoint, 12 of padding aside; "
                                     "no poison left in memory")
