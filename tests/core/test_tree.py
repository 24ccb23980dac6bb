"""Trees of tensors: a changed copy is the same object but for its tensors; nothing is computed anew."""

import copy
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from on_ranks import Checks
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from minifsdp.ddp import DistributedDataParallel
from minifsdp.fsdp import FullyShardedDataParallel, MixedPrecision
from minifsdp.fsdp2 import MixedPrecisionPolicy, fully_shard
from minifsdp.pipeline import PipelineStage, ScheduleGPipe
from minifsdp.tree import map_tensors, tensors_in


@dataclass
class Counted:
    x: Any
    rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.rows += len(self.x)


@dataclass(init=False)
class Own:
    x: Any

    def __init__(self, given: Any) -> None:
        self.x = given


@dataclass
class Scaled:
    x: Any
    scale: InitVar[float] = 2.0

    def __post_init__(self, scale: float) -> None:
        self.x = self.x * scale
        self.half = self.x / 2  # no field


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    __hidden: Any = 3


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """As those of transformers: its fields are its items, too."""

    x: Any = None

    def __post_init__(self) -> None:
        assert "x" not in self, "made again"
        self["x"] = self.x

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclass
class FailureError(ValueError):
    x: Any


class Items(dict):  # type: ignore[type-arg]
    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first=first, second=second)
        self.note = "kept"


class ByAttribute(dict):  # type: ignore[type-arg]
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Doubled(tuple):  # type: ignore[type-arg]
    def __new__(cls, x: Any, number: int) -> "Doubled":
        return super().__new__(cls, (x, 2 * number))


class Several(list):  # type: ignore[type-arg]
    def __init__(self, number: int, *each: Any) -> None:
        super().__init__(each)
        self.number = number


class Fixed(Mapping):  # type: ignore[type-arg]
    """A mapping that cannot be written to, and cannot be made from its items."""

    def __init__(self, note: str, **items: Any) -> None:
        self.inner, self.note = items, note

    def __getitem__(self, key: str) -> Any:
        return self.inner[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Written(Fixed, MutableMapping):  # type: ignore[type-arg]
    """A shallow copy of it shares its inner dict."""

    def __setitem__(self, key: str, value: Any) -> None:
        self.inner[key] = value

    def __delitem__(self, key: str) -> None:
        del self.inner[key]


class Slotted(Written):
    __slots__ = ("inner", "note")

    def copy(self) -> "Slotted":
        raise AssertionError("copied")


class Named(UserDict):  # type: ignore[type-arg]
    def __init__(self, note: str, **items: Any) -> None:
        super().__init__(**items)
        self.note = note


class Pair(NamedTuple):
    x: Any
    rest: Any


X = torch.arange(3.0)
TREES = [
    *(Counted(X), Own(X), Scaled(X), Frozen(X), Frozen([X]), Output(X), FailureError(X), Items(X, (X, 1))),
    Doubled(X, 2),
    *(Several(4, X, X), Pair(X, {"y": [X]}), OrderedDict(b=X, a=1), UserDict(x=X), deque([X], maxlen=3), {X}),
    *(
        Fixed("kept", x=X),
        Written("kept", x=X),
        Slotted("kept", x=[X]),
        Named("kept", x=X),
        ChainMap({"x": X}, {"y": X}),
    ),
    *(MappingProxyType({"x": X}), MappingProxyType({"x": Written("kept", x=X)})),
    *(defaultdict(list, x=[X]), torch.max(torch.eye(2), 0), frozenset([X]), [X, (X, {"x": Own(Scaled(X))})]),
]


def lowered(t: Tensor) -> Tensor:
    return t.bfloat16() if t.is_floating_point() else t


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_tensors_change_and_nothing_else(tree: Any) -> None:
    before = [t.tolist() for t in tensors_in(tree)]
    changed = map_tensors(lowered, tree)
    assert type(changed) is type(tree)
    assert changed is not tree
    assert [t.tolist() for t in tensors_in(changed)] == before
    assert {t.dtype for t in tensors_in(changed)} <= {torch.bfloat16, torch.int64}
    assert {t.dtype for t in tensors_in(tree)} <= {torch.float32, torch.int64}
    assert map_tensors(lambda t: t, tree) is tree


def test_what_is_no_tensor_is_kept() -> None:
    assert map_tensors(lowered, Items(X, 1)).note == "kept"
    assert map_tensors(lowered, Several(4, X)).number == 4
    for mapping in (Fixed("kept", x=X), Written("kept", x=X), Slotted("kept", x=X), Named("kept", x=X)):
        changed = map_tensors(lowered, mapping)
        assert (changed["x"].dtype, changed.note) == (torch.bfloat16, "kept")
    assert map_tensors(lowered, Counted(X)).rows == 3
    assert map_tensors(lowered, Doubled(X, 2))[1] == 4
    assert map_tensors(lowered, Frozen(X))._Frozen__hidden == 3
    assert map_tensors(lowered, defaultdict(list, x=X))["y"] == []
    assert map_tensors(lowered, deque([X], maxlen=3)).maxlen == 3
    assert map_tensors(lowered, Scaled(X)).half.dtype == torch.bfloat16
    unchanged = Own([1, 2])
    assert map_tensors(lowered, [X, unchanged, Counter("a")])[1] is unchanged


def test_a_shared_tensor_stays_shared_and_is_changed_once() -> None:
    shared = Own(X)
    one, (two, three), four = map_tensors(lowered, [X, (X, shared), shared])
    assert one is two is three.x
    assert three is four
    assert tensors_in([X, (X, shared)]) == [X]
    output = map_tensors(lowered, Output(X))
    assert output.x is output["x"]
    named = map_tensors(lowered, ByAttribute(x=X, y=[X]))
    assert named.x is named["x"] is named.y[0]
    assert named.x.dtype == torch.bfloat16
    named.z = 1
    assert named["z"] == 1
    several = Several(4, X, [X])
    several.first, several.rest, several.other = several[0], several[1], X.clone()
    changed = map_tensors(lowered, several)
    assert changed.first is changed[0] is changed.rest[0]
    assert changed.rest is changed[1]
    assert changed.other is several.other, "it is no item"
    assert several.first is X


def test_an_object_may_contain_itself() -> None:
    loop: list[Any] = [X]
    loop.append(loop)
    assert tensors_in(loop) == [X]
    assert map_tensors(lowered, loop)[0].dtype == torch.bfloat16


def test_tensors_come_in_order() -> None:
    y, z = X + 1, X + 2
    assert [t.tolist() for t in tensors_in(((X, {"y": [y]}), Own(z)))] == [t.tolist() for t in (X, y, z)]


def test_the_lengths_of_packed_sequences_stay() -> None:
    packed = map_tensors(lowered, pack_sequence([X, X[:2]]))
    assert isinstance(packed, PackedSequence)
    assert packed.data.dtype == torch.bfloat16
    assert packed.batch_sizes.tolist() == [2, 2, 1]


# On ranks: casts of inputs and outputs, DDP's search for gradients, and micro-batches

check = Checks(__name__)


@dataclass
class Batch:
    """Its `__init__` would double the values again; one field it does not take, two share a tensor."""

    x: Tensor
    name: str = "batch"
    same: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.x = self.x * 2
        self.same = self.x


@dataclass(frozen=True)
class Result:
    y: Tensor
    count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "y", self.y + 1)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, batch: Batch) -> Result:
        assert batch.same is batch.x
        return Result(self.second(torch.relu(self.first(batch.x) + self.first(batch.same))))


def fsdp1(module: nn.Module) -> nn.Module:
    policy = MixedPrecision(torch.float64, cast_forward_inputs=True)
    return FullyShardedDataParallel(module, mixed_precision=policy, use_orig_params=True)


def fsdp2(module: nn.Module) -> nn.Module:
    return fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.float64, output_dtype=torch.float64))


@check(wrap={"FSDP1": fsdp1, "FSDP2": fsdp2, "DDP": lambda module: DistributedDataParallel(module.double())})
def dataclasses_go_through_wrappers_as_they_are(wrap: Any) -> None:
    alone = Doubling()
    model = wrap(copy.deepcopy(alone))
    x = torch.randn(3, 4)
    alone.double()
    dtype = torch.float64 if isinstance(model, DistributedDataParallel) else torch.float32
    results = [each(Batch(x.to(kind))) for each, kind in ((model, dtype), (alone, torch.float64))]
    for each in results:
        each.y.square().sum().backward()
    torch.testing.assert_close(results[0].y.double(), results[1].y)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone)]
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model(Batch(x.to(dtype))).y.double(), alone(Batch(x.double())).y, rtol=0, atol=1e-5)


class Into(nn.Linear):
    def forward(self, batch: Any, more: Any = None) -> Tensor:  # type: ignore[override]
        assert len(batch.x) == 2
        assert batch.same is batch.x
        assert batch.name == "batch"
        y = super().forward(batch.x)
        return y if more is None else y + more["here"].x


@check(named=(False, True))
def dataclasses_are_cut_into_micro_batches(named: bool) -> None:
    torch.manual_seed(0)
    stages, batch, more = [Into(4, 4), nn.Linear(4, 4)], Batch(torch.randn(8, 4)), {"here": Batch(torch.randn(8, 4))}
    mine = copy.deepcopy(stages[dist.get_rank()])
    schedule = ScheduleGPipe(PipelineStage(mine, dist.get_rank(), 2, "cpu"), 4, lambda y, target: y.square().mean())
    last = dist.get_rank() == 1
    given = {} if last or not named else {"more": more}
    output = schedule.step(*([] if last else [batch]), **given, target=torch.zeros(8) if last else None)
    y = nn.functional.linear(batch.x, stages[0].weight, stages[0].bias)
    expected = stages[1](y + more["here"].x if named else y)
    expected.square().mean().backward()
    for p, q in zip(mine.parameters(), stages[dist.get_rank()].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    if last:
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize(("ranks", "name"), check.params)
def test_on_ranks(ranks: int, name: str) -> None:
    check.assert_passed(ranks, name)
