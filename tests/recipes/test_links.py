"""Messages on links of two speeds, by arithmetic: the axes that leave a host, their bytes, the seconds of a step."""

from __future__ import annotations

from itertools import permutations
from math import inf, prod

import pytest
import torch

from minifsdp.calls import Call
from minifsdp.cost.bubble import bubble
from minifsdp.cost.data_parallel import Setting
from minifsdp.cost.links import Hosts, Link, Talk, messages, talk, wire
from minifsdp.cost.model import CUTS, gpt
from minifsdp.cost.step import UNITS, step
from minifsdp.cost.traffic import Message, sent
from minifsdp.mesh import Mesh, leaves_host
from minifsdp.pipeline.simulate import simulate
from minifsdp.recipe import Recipe

MODEL = gpt(61, 24, 4, 4, 8)
SETTING = Setting(8, batch=16)
CUBE = "pp=2,dp=2,tp=2,zero=1,sequence"
ORDERS = ["/".join(order) for order in permutations(("pp", "dp", "tp"))]
FAST, SLOW = Link(1e-3, 1e8), Link(1e-2, 1e6)


def leaving(mesh: Mesh, host: int) -> list[str]:
    return [axis for axis in mesh.divided if leaves_host(mesh.groups(axis), host)]


@pytest.mark.parametrize("order", ORDERS)
def test_on_hosts_of_four_of_eight_ranks_only_the_outermost_axis_leaves_a_host(order: str) -> None:
    """So tensor parallelism inside a host keeps data parallelism inside, too, if the pipeline goes across instead."""
    mesh = Recipe.parse(f"{CUBE},axes={order}").mesh
    first, _, last = order.split("/")
    assert leaving(mesh, 4) == [first]
    assert leaving(mesh, 2) == [axis for axis in order.split("/") if axis != last]
    assert leaving(mesh, 8) == []


@pytest.mark.parametrize("host", [1, 2, 4, 8])
def test_axes_inside_a_host_fit_into_it(host: int) -> None:
    """With one axis beside tensor parallelism, and several hosts, either of them has to cross."""
    for sizes in ({"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}, {"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}):
        for order in permutations(sizes):
            mesh = Mesh(**sizes, axes=order)
            inside = [axis for axis in mesh.divided if axis not in leaving(mesh, host)]
            assert prod(mesh.size(axis) for axis in inside) <= host
            assert bool(leaving(mesh, host)) == (host < mesh.ranks)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"])
def test_bytes_on_the_wire_are_the_logs(op: str) -> None:
    for ranks in (2, 3, 8):
        assert wire(Message("dp", op, 840), ranks) == Call(op, op, "", 0, 840, ranks, torch.float32).wire


@pytest.mark.parametrize(
    "text",
    [CUBE, "pp=4,tp=2", "dp=4,replicate=2,tp=2", "dp=2,cp=2,tp=2", "pp=2,dp=2,order=interleaved,stages=2", "cp=4,dp=2"],
)
@pytest.mark.parametrize("host", [2, 4])
def test_every_message_takes_one_of_the_links(text: str, host: int) -> None:
    recipe = Recipe.parse(text)
    for rank in range(recipe.mesh.ranks):
        found: dict[Message, int] = {}
        for each in messages(MODEL, recipe, rank, SETTING, Hosts(FAST, SLOW, host)):
            found[each.kind] = found.get(each.kind, 0) + each.times
        assert found == {kind: count for kind, count in sent(MODEL, recipe, rank, SETTING).items() if count}


def test_a_stage_s_messages_take_the_link_to_the_next_stage() -> None:
    """Stages of two ranks on hosts of four: the second sends up to the other host, and down inside its own."""
    recipe, hosts = Recipe.parse("pp=4,tp=2,micro=4"), Hosts(FAST, SLOW, 4)
    sends = [
        {each.across: each.times for each in messages(MODEL, recipe, rank, SETTING, hosts) if each.kind.op == "send"}
        for rank in range(8)
    ]
    inside, both = {False: 4}, {False: 4, True: 4}
    assert sends == [inside, inside, both, both, both, both, inside, inside]


def test_messages_that_leave_a_host_together_share_its_bandwidth() -> None:
    """All four ranks of a host send to the other one at once; on hosts of two, two do."""
    for host in (4, 2):
        links = Hosts(FAST, SLOW, host)
        (across,) = [
            each
            for each in messages(MODEL, Recipe.parse(f"{CUBE},axes=pp/tp/dp"), 0, SETTING, links)
            if each.kind.op == "send"
        ]
        assert across.seconds == SLOW.latency + host * across.sent / SLOW.bandwidth


def data_parallel(recipe: str, rank: int) -> Talk:
    found = talk(MODEL, Recipe.parse(recipe), rank, SETTING, Hosts(FAST, FAST, 8))
    return next(each for each in found if each.axis == "dp")


def test_the_other_axes_divide_what_data_parallelism_sends() -> None:
    """Exactly, but for what tensor parallelism leaves whole, and padding and counts of 4 bytes for each parameter."""
    alone = data_parallel("dp=2,zero=1", 0).sent
    parts = [data_parallel("pp=2,dp=2,tp=2,zero=1", rank).sent for rank in (0, 1, 4, 5)]  # one of each replica's four
    assert max(parts) < alone / 2
    whole = sum(torch.Size(shape).numel() for name, shape in MODEL.named if name not in CUTS)
    rest = sum(parts) - (alone + 4 * whole)  # sent once more; a reduction and a gather over two ranks send it once
    tensors = len(MODEL.named)
    assert 0 <= rest <= 4 * 2 * tensors + 8 * 16


# A step


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved,stages=2", "zb-h1"])
def test_without_links_a_step_has_the_pipeline_s_bubble(order: str) -> None:
    recipe = Recipe.parse(f"pp=2,order={order},micro=4")
    free = Hosts(Link(0.0, inf), Link(0.0, inf), 8)
    assert step(MODEL, recipe, SETTING, free, 1.0) == pytest.approx(1 / (1 - bubble(recipe)))


def test_nothing_hides_what_a_rank_waits_for() -> None:
    recipe, hosts = Recipe.parse("dp=2,tp=2,zero=1"), Hosts(FAST, SLOW, 2)
    total = sum(each.seconds for each in talk(MODEL, recipe, 0, SETTING, hosts))
    assert step(MODEL, recipe, SETTING, hosts, 0.5) == pytest.approx(0.5 + total)


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "zb-h1"])
def test_messages_between_stages_delay_whoever_waits_for_them(order: str) -> None:
    """As in the pipeline's own simulation; and a receive waits for what the rank itself is sending. Losses follow."""
    recipe, latency, micros = Recipe.parse(f"pp=2,order={order},micro=8"), 0.25, 8
    units = sum(UNITS[kind] for _, kind, _ in recipe.actions[0])
    expected = simulate(recipe.actions, UNITS, latency).length + latency
    found = step(MODEL, recipe, SETTING, Hosts(Link(latency, inf), SLOW, 8), units)
    assert expected <= found <= expected + latency * micros
    assert order != "gpipe" or found == pytest.approx(expected)


def test_messages_to_another_stage_delay_those_behind_them_on_their_link_alone() -> None:
    recipe = Recipe.parse("pp=2,tp=2,order=gpipe,micro=8")
    same, apart = (step(MODEL, recipe, SETTING, Hosts(Link(1e-2, inf), Link(1e-2, inf), host)) for host in (4, 2))
    assert apart < same


def test_what_talks_most_goes_inside() -> None:
    """Tensor parallelism first, then data parallelism, then the pipeline."""
    times = {
        order: step(MODEL, Recipe.parse(f"{CUBE},axes={order}"), SETTING, Hosts(FAST, SLOW, 4)) for order in ORDERS
    }
    outermost = {order.split("/")[0]: seconds for order, seconds in times.items()}
    assert outermost["pp"] < outermost["dp"] < outermost["tp"]
    for order, seconds in times.items():
        assert seconds == pytest.approx(outermost[order.split("/")[0]])
