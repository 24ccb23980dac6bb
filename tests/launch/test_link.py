"""The emulated link: order, times by its own clock, data that is not there too early, and what it leaves behind."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from minifsdp import comm
from minifsdp.comm import Call
from minifsdp.instruments.launch import launch
from minifsdp.instruments.link.emulated import EmulatedLink, HostLinks, Transfer, parse_link, parse_links

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MIB = 2**20


def gather(order: int = 0, payload: int = MIB) -> Call:
    return Call("all_gather", "all_gather_single", "0", order, payload, ranks=2)


class Collective:
    """Stands for a real one: `wait()` takes `seconds`, notes the time and perhaps fails."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.started = self.done = 0.0

    def __call__(self) -> Collective:
        self.started = time.perf_counter()
        return self

    def wait(self) -> None:
        time.sleep(self.seconds)
        if self.error:
            raise self.error
        self.done = time.perf_counter()


def seconds(transfer: Transfer) -> float:
    return transfer.end - transfer.start + 1e-9


@pytest.mark.parametrize(
    ("text", "latency", "bandwidth"),
    [
        ("latency=1e-3,bandwidth=1e9", 1e-3, 1e9),
        ("latency=200us,bandwidth=1GB/s", 2e-4, 1e9),
        (" bandwidth = 1.5 MiB/s , latency = 2 ms ", 2e-3, 1.5 * MIB),
        ("latency=0,bandwidth=.5kB", 0.0, 500.0),
        ("latency=10µs,bandwidth=100Gbit/s", 1e-5, 12.5e9),
    ],
)
def test_a_link_is_read_from_text_in_usual_units(text: str, latency: float, bandwidth: float) -> None:
    link = parse_link(text)
    assert (link.latency, link.bandwidth) == (pytest.approx(latency), pytest.approx(bandwidth))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "neither"),
        ("latency=1ms", "no bandwidth"),
        ("bandwidth=1GB/s", "no latency"),
        ("latency=1ms,bandwidth=1GB/s,latency=2ms", "'latency=2ms'"),
        ("latency=1ms,bandwidth=1GB/s,jitter=1", "'jitter=1'"),
        ("latency=fast,bandwidth=1GB/s", "'fast'"),
        ("latency=-1,bandwidth=1GB/s", "'-1'"),
        ("latency=1ms/s,bandwidth=1GB/s", "'1ms/s'"),
        ("latency=1ms,bandwidth=0", "positive"),
        ("latency=1ms,bandwidth=1Gb/s", "Gbit"),
        ("latency=1e999,bandwidth=1GB/s", "inf"),
        ("latency=nan,bandwidth=1GB/s", "'nan'"),
    ],
)
def test_bad_text_is_refused_in_one_line_that_names_what_and_shows_how(text: str, says: str) -> None:
    check_refused(parse_link, text, says, "latency=200us,bandwidth=1GB/s")


def check_refused(parse: Callable[[str], object], text: str, says: str, shows: str) -> None:
    with pytest.raises(ValueError, match="bad link") as caught:
        parse(text)
    message = str(caught.value)
    assert says in message
    assert shows in message
    assert "\n" not in message


def test_two_links_are_read_from_text_and_one_as_before() -> None:
    links = parse_links(" across = 200us@0.5GB/s, inside=5us @ 10GB/s,host = 4 ")
    assert isinstance(links, HostLinks)
    found = [(each.latency, each.bandwidth) for each in (links.inside, links.across)]
    assert found == [(pytest.approx(5e-6), 1e10), (pytest.approx(2e-4), 5e8)]
    assert links.per_host == 4
    assert isinstance(parse_links("latency=1ms,bandwidth=1GB/s"), EmulatedLink)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("inside=5us@10GB/s", "no across"),
        ("inside=5us@10GB/s,across=1ms@1GB/s", "no host"),
        ("inside=5us@10GB/s,across=1ms@1GB/s,host=2,host=4", "'host=4'"),
        ("inside=5us@10GB/s,across=1ms@1GB/s,host=4,latency=1ms", "'latency=1ms'"),
        ("inside=5us,across=1ms@1GB/s,host=4", "'5us'"),
        ("inside=5us@10GB/s,across=1ms@slow,host=4", "'slow'"),
        ("inside=5us@10GB/s,across=1ms@0,host=4", "positive"),
        ("inside=5us@10GB/s,across=1ms@1GB/s,host=0", "'0'"),
    ],
)
def test_bad_text_of_two_links_is_refused_in_one_line(text: str, says: str) -> None:
    check_refused(parse_links, text, says, "inside=5us@10GB/s,across=200us@1GB/s,host=4")


def test_a_message_takes_latency_plus_wire_bytes_over_bandwidth() -> None:
    link = EmulatedLink(latency=0.25, bandwidth=MIB)
    assert link.seconds(gather(payload=4 * MIB)) == 0.25 + 2  # half of the payload crosses the wire at 2 ranks
    assert link.seconds(gather()._replace(op="all_reduce")) == 0.25 + 1
    assert link.seconds(gather()._replace(op="recv")) == 0


def test_messages_go_one_at_a_time_in_the_order_of_issue() -> None:
    with EmulatedLink(latency=0.01, bandwidth=50 * MIB) as link:
        collectives = [Collective() for _ in range(4)]
        issued = time.perf_counter()
        messages = [link.submit(gather(i, (i + 1) * MIB), c) for i, c in enumerate(collectives)]
        for message in reversed(messages):  # the order of waiting changes nothing
            message.wait()
        waited = time.perf_counter()
    assert [transfer.payload for transfer in link.transfers] == [MIB, 2 * MIB, 3 * MIB, 4 * MIB]
    assert link.transfers[0].start >= issued
    assert link.transfers[-1].end <= waited
    for before, after in zip(link.transfers, link.transfers[1:], strict=False):
        assert after.start == before.end  # back to back, and never two at once
    for number, transfer in enumerate(link.transfers, start=1):
        assert seconds(transfer) >= 0.01 + number / 100
    assert [c.started for c in collectives] == sorted(c.started for c in collectives)


def test_the_real_collective_runs_at_the_end_of_the_messages_time() -> None:
    with EmulatedLink(latency=0.5, bandwidth=1e12) as link:
        collective = Collective()
        message = link.submit(gather(), collective)
        early = collective.started  # nobody waited: the data is not there
        message.wait()
    assert early == 0
    assert collective.started - link.transfers[0].start >= 0.5
    assert collective.done > collective.started


def test_a_collective_that_has_shown_its_cost_runs_within_its_messages_time() -> None:
    with EmulatedLink(latency=0.1, bandwidth=1e12) as link:
        collectives = [Collective(0.05) for _ in range(4)]
        for number, collective in enumerate(collectives):
            link.submit(gather(number), collective).wait()
    early = [transfer.end - c.started for c, transfer in zip(collectives, link.transfers, strict=True)]
    assert max(early[1:]) > 0.01  # begun before the message's time was over, so that the two do not add up
    assert all(seconds(transfer) >= 0.1 for transfer in link.transfers)


def test_a_collective_slower_than_the_link_takes_its_own_time() -> None:
    with EmulatedLink(latency=0.001, bandwidth=1e12) as link:
        slow, fast = Collective(0.05), Collective()
        messages = [link.submit(gather(0), slow), link.submit(gather(1), fast)]
        messages[0].wait()
        assert slow.done > 0
        messages[1].wait()
    first, second = link.transfers
    assert seconds(first) >= 0.05
    assert second.start == first.end


def test_an_exception_surfaces_where_it_is_waited_for_and_the_link_goes_on() -> None:
    with EmulatedLink(latency=0.0, bandwidth=1e12) as link:
        broken = link.submit(gather(0), Collective(error=RuntimeError("connection closed by peer")))
        sound = link.submit(gather(1), Collective())
        sound.wait()
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            broken.wait()
    assert len(link.transfers) == 1


def test_leaving_the_link_carries_what_is_queued_and_ends_its_thread() -> None:
    collective = Collective()
    with EmulatedLink(latency=0.05, bandwidth=1e12) as link:
        link.submit(gather(), collective)
        assert comm.link is link
        assert "emulated-link" in {thread.name for thread in threading.enumerate()}
    assert collective.done > 0
    assert comm.link is None
    assert "emulated-link" not in {thread.name for thread in threading.enumerate()}


def test_leaving_by_an_exception_abandons_what_peers_may_never_answer() -> None:
    collectives = [Collective() for _ in range(3)]
    threads: list[threading.Thread] = []

    def be_interrupted() -> None:
        with EmulatedLink(latency=0.2, bandwidth=1e12) as link:
            threads.extend(thread for thread in threading.enumerate() if thread.name == "emulated-link")
            for number, collective in enumerate(collectives):
                link.submit(gather(number), collective)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert comm.link is None
    (thread,) = threads
    assert thread.daemon  # even one that waits for a dead peer lets the process end
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert [collective.started for collective in collectives[1:]] == [0, 0]


def test_one_link_at_a_time_and_usable_again() -> None:
    link = EmulatedLink(latency=0.0, bandwidth=1e12)
    with link:
        with pytest.raises(RuntimeError, match="installed already"):
            EmulatedLink(0.0, 1.0).__enter__()
        assert comm.link is link
    with link:
        link.submit(gather(), Collective()).wait()
    assert len(link.transfers) == 1


def test_an_unopened_link_travels_to_ranks() -> None:
    link = pickle.loads(pickle.dumps(parse_link("latency=1ms,bandwidth=1GB/s")))
    assert (link.latency, link.bandwidth) == (1e-3, 1e9)


# On two gloo ranks


def exchange_everything() -> dict[str, list[float]]:
    """The result of every operation of `comm` on this rank."""
    group, rank = comm.world(), dist.get_rank()
    mine = torch.arange(6.0) + 10 * rank

    def result(start: Callable[..., comm.Handle], output: torch.Tensor, *args: Any) -> list[float]:
        start(output, *args).wait()
        return output.tolist()

    results = {
        "all_reduce": result(comm.all_reduce, mine.clone(), group, comm.MEAN),
        "all_gather": result(comm.all_gather, torch.empty(12), mine, group),
        "reduce_scatter": result(comm.reduce_scatter, torch.empty(3), mine, group),
        "all_to_all": result(comm.all_to_all, torch.empty(6), mine, group),
        "broadcast": result(comm.broadcast, mine.clone(), 1, group),
    }
    received = torch.empty(6)
    handles = [comm.send(mine, 1 - rank, group), comm.recv(received, 1 - rank, group)]  # both send before they receive
    for handle in handles:
        handle.wait()
    return results | {"recv": received.tolist()}


def compute(seconds: float) -> float:
    """Busy for that long; returns when it began."""
    start = time.perf_counter()
    while time.perf_counter() < start + seconds:
        torch.randn(64, 64) @ torch.randn(64, 64)
    return start


def two_gathers(at_once: bool) -> dict[str, Any]:
    """Two gathers of 40 ms and 60 ms of compute: both issued first, or each waited for at once."""
    shard, outputs = torch.full((1000,), float(dist.get_rank())), [torch.empty(2000), torch.empty(2000)]
    with EmulatedLink(latency=0.04, bandwidth=1e12) as link:
        if at_once:
            for output in outputs:
                comm.all_gather(output, shard, comm.world()).wait()
            computed = compute(0.06)
        else:
            handles = [comm.all_gather(output, shard, comm.world()) for output in outputs]
            computed = compute(0.06)
            for handle in handles:
                handle.wait()
    sums = [output.sum().item() for output in outputs]
    return {"computed": computed, "transfers": link.transfers, "sums": sums}


def bad_collective() -> str:
    with EmulatedLink(latency=0.0, bandwidth=1e12):
        handle = comm.all_gather(torch.empty(3), torch.empty(2), comm.world())  # 3 is no multiple of 2
        try:
            handle.wait()
        except (RuntimeError, ValueError) as error:
            return type(error).__name__
    return "nothing"


def on_a_rank() -> dict[str, Any]:
    plain = exchange_everything()
    with comm.record() as log, EmulatedLink(latency=1e-3, bandwidth=1e9) as link:
        carried = exchange_everything()
    return {
        "plain": plain,
        "carried": carried,
        "logged": [(call.op, call.payload) for call in log],
        "transferred": [(transfer.op, transfer.payload) for transfer in link.transfers],
        "overlapped": two_gathers(at_once=False),
        "at once": two_gathers(at_once=True),
        "bad": bad_collective(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(on_a_rank, 2)


def test_data_is_the_same_as_without_the_link(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["carried"] == rank["plain"]
    assert ranks[0]["plain"]["recv"] == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]


def test_every_call_is_carried_in_the_order_of_issue(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["transferred"] == rank["logged"] == ranks[0]["logged"]
        assert len(rank["logged"]) == 7


def test_messages_travel_while_the_rank_computes(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        first, second = rank["overlapped"]["transfers"]
        assert first.start <= rank["overlapped"]["computed"] < first.end  # under way when the rank began to compute
        assert first.end <= second.start
        assert rank["overlapped"]["sums"] == [1000.0, 1000.0]


def test_waiting_at_once_leaves_nothing_to_overlap(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        transfers: list[Transfer] = rank["at once"]["transfers"]
        assert max(transfer.end for transfer in transfers) <= rank["at once"]["computed"]


def test_a_real_collectives_error_reaches_the_wait(ranks: list[dict[str, Any]]) -> None:
    assert [rank["bad"] for rank in ranks] != ["nothing", "nothing"]


def on_two_hosts() -> dict[str, Any]:
    """Messages of a rank of 2 hosts x 2 inside, across in two rings, and over all ranks in one; and other times."""
    inside, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    with HostLinks(EmulatedLink(0.0, 10 * MIB), EmulatedLink(0.01, 10 * MIB), per_host=2) as links:
        tensor = torch.ones(MIB // 4)
        wait_for(comm.all_reduce(tensor.clone(), group) for group in (inside, across, comm.world()))
        with pytest.raises(RuntimeError, match="a link is installed already"), EmulatedLink(0.0, 1.0):
            pass
    assert comm.link is None
    with HostLinks(EmulatedLink(0.1, 1e12), EmulatedLink(0.1, 1e12), per_host=2) as both:
        wait_for(comm.all_reduce(torch.ones(4), group) for group in (inside, across, inside, across))
    with HostLinks(EmulatedLink(0.0, 1e12), EmulatedLink(0.0, 1e12), per_host=2) as pairs:
        up, down = (dist.get_rank() + 1) % 4, (dist.get_rank() - 1) % 4
        wait_for([comm.send(torch.ones(4), up, comm.world()), comm.recv(torch.empty(4), down, comm.world())])
    rings = [(each.op, each.payload, seconds(each)) for each in links.transfers]
    return {"rings": rings, "at once": both.transfers, "pairs": sorted(each.op for each in pairs.transfers)}


def wait_for(handles: Iterable[comm.Handle]) -> None:
    """All issued before the first is waited for."""
    for handle in list(handles):
        handle.wait()


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return launch(on_two_hosts, 4)


def test_groups_inside_a_host_and_across_hosts_have_links_of_their_own(four_ranks: list[dict[str, Any]]) -> None:
    for rank in (each["rings"] for each in four_ranks):
        (*_, on_inside), (*_, in_one_ring), (*_, in_two_rings) = sorted(rank, key=lambda each: (each[0], each[2]))
        assert [op for op, *_ in sorted(rank)] == ["all_reduce", "all_reduce across", "all_reduce across"]
        assert on_inside >= 0.1  # 1 MiB: a rank of 2 sends as much as the tensor has
        assert in_one_ring >= 0.01 + 0.15 - 1e-9  # of 4: 3/2 of it, in the one ring that leaves the host
        assert in_two_rings >= 0.01 + 0.2 - 1e-9  # two rings share what leaves the host


def test_a_send_takes_the_link_to_its_receiver(four_ranks: list[dict[str, Any]]) -> None:
    """Not that of its group, which has ranks on both hosts."""
    first, second = ["recv across", "send"], ["recv", "send across"]
    assert [rank["pairs"] for rank in four_ranks] == [first, second, first, second]


def test_both_links_of_a_rank_work_at_the_same_time_each_with_one_message(four_ranks: list[dict[str, Any]]) -> None:
    """By the links' own clock."""
    for transfers in (rank["at once"] for rank in four_ranks):
        inside = [each for each in transfers if not each.op.endswith("across")]
        across = [each for each in transfers if each.op.endswith("across")]
        for first, second in (inside, across):
            assert first.end <= second.start
        assert max(inside[0].start, across[0].start) < min(inside[0].end, across[0].end)
