"""Checks: functions that run on ranks, all of a file's in one launch per number of ranks, each a test of its own.

    check = Checks(__name__)

    @check()
    def a_unit_is_freed() -> None: ...

    @check(ranks=4, behaviour=(17, 24), strategy=(FULL_SHARD, NO_SHARD), options={"flat": {}, "offloaded": {...}})
    def a_unit_is_gathered_once(strategy: ShardingStrategy, options: dict[str, Any]) -> None: ...

    @pytest.mark.parametrize(("ranks", "name"), check.params)
    def test_on_ranks(ranks: int, name: str) -> None:
        check.assert_passed(ranks, name)

Here `a_unit_is_freed-2` is a test, and `a_unit_is_gathered_once-NO_SHARD-flat-4`.
What pytest has deselected is not run.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from minifsdp.instruments.launch import RankError, launch, report

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Check = Callable[[], Any]

SECONDS_OF_A_CHECK = 5  # on a loaded machine, all together: a launch that is too slow fails all of its checks

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
SCALES_SUMMANDS = TORCH >= (2, 12)
"""True if `clip_grad_norm_` scales gradients whose sum over the ranks is pending, without `foreach=False`, too."""


class Checks:
    """A file's checks; the decorator that collects them.

    Args:
        module: the file's `__name__`. Its functions and classes go to the ranks by value, with pytest's assertions.

    Attributes:
        params: the number of ranks and the name of each check, marked with the behaviours that it shows.
    """

    def __init__(self, module: str) -> None:
        cloudpickle.register_pickle_by_value(sys.modules[module])
        self.params: list[Any] = []
        self._checks: dict[int, dict[str, Check]] = defaultdict(dict)
        self._selected: dict[int, set[str]] = defaultdict(set)
        self._failures: dict[int, dict[str, list[str]]] = {}

    def __call__(
        self,
        *,
        ranks: int | tuple[int, ...] = 2,
        slow: tuple[int, ...] = (),
        wide: bool | str = False,
        behaviour: int | tuple[int, ...] = (),
        **axes: Iterable[Any],
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Run the function once for every combination of the values of its arguments.

        On the first number of ranks CI runs any two arguments' values together, on the others each value. What only
        combines more than that is left to `make test-full`.

        Args:
            ranks: how many ranks run it; with several numbers it is a check on each. Those after the first are `wide`,
                as are all above four.
            slow: of these numbers, those that CI leaves to `make test-full`.
            wide: leave all of them to `make test-wide`: more of what `make test` shows with less. "combinations": leave
                it those without which `make test` still meets every value of every argument.
            behaviour: the numbers in docs/parity.md of what it shows.
            **axes: of each argument the values, or titles and values.
        """
        numbers = (behaviour,) if isinstance(behaviour, int) else behaviour
        marks = [pytest.mark.behaviour(*numbers)] if numbers else []
        several = (ranks,) if isinstance(ranks, int) else ranks
        first = next((number for number in several if number not in slow), 0)
        titles = [[*titled(values)] for values in axes.values()]
        rounds = range(max(map(len, titles), default=1))
        enough = [tuple(values[turn % len(values)] for values in titles) for turn in rounds]
        every_pair = with_pairs([*product(*titles)], enough)

        def collect(fn: Callable[..., Any]) -> Callable[..., Any]:
            for choice in product(*titles):
                name = "-".join([fn.__name__, *(title for title, _ in choice)])
                values = dict(zip(axes, (value for _, value in choice), strict=True))
                more = wide is True or (wide == "combinations" and choice not in enough)
                for number in several:
                    self._checks[number][name] = partial(fn, **values)
                    is_wide = more or number != first or number > 4
                    is_slow = number in slow or choice not in (every_pair if number == first else enough)
                    tier = [pytest.mark.slow] * is_slow + [pytest.mark.wide] * is_wide
                    self.params.append(pytest.param(number, name, id=f"{name}-{number}", marks=[*marks, *tier]))
            return fn

        return collect

    def select(self, ranks: int, name: str) -> None:
        """Let this check be run with those on as many ranks."""
        self._selected[ranks].add(name)

    def assert_passed(self, ranks: int, name: str) -> None:
        """Fail with the tracebacks of the ranks on which it failed. The first call for this many ranks runs them."""
        if ranks not in self._failures:
            checks = {each: check for each, check in self._checks[ranks].items() if each in self._selected[ranks]}
            self._failures[ranks] = run(checks, ranks)
        if texts := self._failures[ranks][name]:
            pytest.fail("\n".join(texts), pytrace=False)


Choice = tuple[tuple[str, Any], ...]
"""Of each argument a title and the value."""


def with_pairs(choices: list[Choice], enough: list[Choice]) -> list[Choice]:
    """`enough`, and more of the choices: any two values that meet in a choice meet in one of these."""

    def pairs(choice: Choice) -> set[Any]:
        return {*combinations(enumerate(title for title, _ in choice), 2)}

    if len(choices[0]) < 3:
        return choices
    found = [*enough]
    left = set().union(*map(pairs, choices)).difference(*map(pairs, enough))
    while left:
        best = max(choices, key=lambda choice: len(left & pairs(choice)))
        found.append(best)
        left -= pairs(best)
    return found


def titled(values: Iterable[Any]) -> Iterable[tuple[str, Any]]:
    if isinstance(values, Mapping):
        return values.items()
    names = (getattr(value, "name", None) or getattr(value, "__name__", str(value)) for value in values)
    return [(name.removeprefix("torch."), value) for name, value in zip(names, values, strict=True)]


def run(checks: dict[str, Check], ranks: int) -> dict[str, list[str]]:
    """What went wrong in each check, rank by rank. A launch that fails, as when a rank hangs, is a failure of all."""
    failures: dict[str, list[str]] = {name: [] for name in checks}

    def note(rank: int, said: Any) -> None:
        match said:  # checks may report things of their own
            case (str(name), str(text)) if name in failures:
                failures[name].append(f"rank {rank}: {text}")

    ended = []
    try:
        launch(run_on_a_rank, ranks, checks, timeout=120 + SECONDS_OF_A_CHECK * len(checks), on_report=note)
    except RankError as error:
        ended = [str(error)]
    return {name: sorted(texts) + ended for name, texts in failures.items()}


def run_on_a_rank(checks: dict[str, Check]) -> None:
    """Each from the same seed, when all ranks have ended the one before; report the ends of tracebacks."""
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check()
        except (Exception, pytest.fail.Exception):
            report((name, traceback.format_exc(limit=-4)))
        dist.barrier()


_meshes: dict[tuple[tuple[int, ...], tuple[str, ...]], Any] = {}


def mesh_of(shape: tuple[int, ...], *names: str) -> Any:
    """A mesh of all ranks of the launch, made once: most of a small check's time would go into process groups."""
    if (shape, names) not in _meshes:
        _meshes[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names or None)
    return _meshes[shape, names]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A new folder, the same on all ranks, for as long as all are inside."""
    with tempfile.TemporaryDirectory() as made:
        path = [made]
        dist.broadcast_object_list(path, 0)
        yield Path(path[0])
        dist.barrier()
