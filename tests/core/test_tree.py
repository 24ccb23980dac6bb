"""Trees of tensors: a changed copy is the same object but for its tensors; nothing is computed anew."""

from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

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


class Doubled(tuple):  # type: ignore[type-arg]
    def __new__(cls, x: Any, number: int) -> "Doubled":
        return super().__new__(cls, (x, 2 * number))


class Several(list):  # type: ignore[type-arg]
    def __init__(self, number: int, *each: Any) -> None:
        super().__init__(each)
        self.number = number


class Pair(NamedTuple):
    x: Any
    rest: Any


X = torch.arange(3.0)
TREES = [
    *(Counted(X), Own(X), Scaled(X), Frozen(X), Frozen([X]), Output(X), FailureError(X), Items(X, (X, 1))),
    Doubled(X, 2),
    *(Several(4, X, X), Pair(X, {"y": [X]}), OrderedDict(b=X, a=1), UserDict(x=X), deque([X], maxlen=3), {X}),
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
