"""An emulated interconnect: each collective takes as long as it would on the link that you describe.

On one machine gloo's messages are cheap and burn the cores that compute, so there is nothing to hide and nowhere to
hide it. An `EmulatedLink` carries the collectives of `minifsdp.comm` instead, and a message of `wire` bytes takes

    max(real, latency + wire / bandwidth)  seconds,

one message at a time, in the order of issue, as on the single stream of an NCCL communicator. The real collective runs
at the end of the message's time and within it, so data read without a wait is not there yet. The CPU time of the real
collective cannot be hidden and slows ranks that compute: count it as compute.

On CPU a thread carries the messages, asleep most of the time; on CUDA they are delayed on a stream of their own, as in
the tests of fairscale's FSDP. Either way the ranks must issue their collectives in the same order, and call
`torch.distributed` directly (for a barrier, say) only while nothing is on its way.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import torch.distributed as dist

from minifsdp import comm, process_groups
from minifsdp.instruments.launch import rank_device
from minifsdp.instruments.link.carriers import ThreadCarrier, Transfer
from minifsdp.instruments.link.stream_carrier import StreamCarrier
from minifsdp.mesh import on_hosts
from minifsdp.private import group_named

__all__ = ["EmulatedLink", "HostLinks", "Transfer", "let_communication_go_first", "parse_link", "parse_links"]

_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BYTES = {"": 1.0, "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_BYTES |= {"kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "Tbit": 1e12 / 8}
_NUMBER = re.compile(r"(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)\s*([A-Za-zµ]*)(/s)?")


class EmulatedLink:
    """A link that carries this rank's collectives while its `with` is open.

    A collective's exception surfaces at its `wait()`. An unopened link holds no thread and no stream: it can be made
    and checked before ranks start, and sent to them.

    Args:
        latency: seconds that every message takes, however short.
        bandwidth: bytes per second; it divides `comm.Call.wire`, the bytes that each rank sends in a ring.

    Attributes:
        transfers: the messages carried, oldest first. On CUDA a message is listed once it is over and the next one is
            issued, or the link is closed.

    Raises:
        ValueError: latency is negative, bandwidth not positive, or either not finite.
        RuntimeError: on entering, another link is installed.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        if not 0 <= latency < inf:
            raise ValueError(f"a link's latency is a number of seconds from 0 up, not {latency}")
        if not 0 < bandwidth < inf:
            raise ValueError(f"a link's bandwidth is a positive number of bytes per second, not {bandwidth}")
        self.latency = latency
        self.bandwidth = bandwidth
        self.transfers: list[Transfer] = []
        self._carrier: ThreadCarrier | StreamCarrier | None = None

    def seconds(self, call: comm.Call) -> float:
        """The least time of a message; 0 for a receive, which counts on its sender's link."""
        return 0.0 if call.op == "recv" else self.latency + call.wire / self.bandwidth

    def submit(self, call: comm.Call, collective: Callable[[], Any]) -> Any:
        """Queue a message on the link; `wait()` of the result returns when it has arrived."""
        assert self._carrier is not None, "the link is not open: `with link:`"
        return self._carrier.submit(call, collective)

    def __enter__(self) -> EmulatedLink:
        _refuse_a_second()
        self._open()
        comm.link = self
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        comm.link = None
        self._close(abandon=error is not None)

    def _open(self) -> None:
        on_cuda = dist.is_initialized() and rank_device().type == "cuda"
        self._carrier = (StreamCarrier if on_cuda else ThreadCarrier)(self.seconds, self.transfers)

    def _close(self, abandon: bool) -> None:
        carrier, self._carrier = self._carrier, None
        assert carrier is not None
        carrier.close(abandon)

    def __repr__(self) -> str:
        return f"EmulatedLink(latency={self.latency:g} s, bandwidth={self.bandwidth:g} B/s)"


class HostLinks:
    """Two emulated links at once: messages of ranks on one host use one, messages between hosts the other.

    Hosts have `per_host` ranks each, in rank order. A collective uses the slower link if its group has ranks on several
    hosts, since every rank of a ring waits for the slowest; a send, if its receiver is on another host. As NVLink and
    network cards do, both links of a rank work at the same time, each with one message at a time.

    A ring leaves a host once, over all of its network cards. If each rank of a host is in a group of its own, as in
    hybrid sharding, that many rings leave it at once and share the bandwidth of the cards equally; so do sends.

    Args:
        inside: between two ranks of a host.
        across: from one host to the next, all of its cards together.
        per_host: ranks of a host.
    """

    def __init__(self, inside: EmulatedLink, across: EmulatedLink, per_host: int) -> None:
        self.inside, self.per_host = inside, per_host
        self.across = _SharedLink(across.latency, across.bandwidth)

    @property
    def transfers(self) -> list[Transfer]:
        """All transfers of both links, oldest first; `op` marks those across hosts."""
        across = [each._replace(op=f"{each.op} across") for each in self.across.transfers]
        return sorted(self.inside.transfers + across, key=lambda each: each.start)

    def submit(self, call: comm.Call, collective: Callable[[], Any]) -> Any:
        """Queue a message on its link."""
        key = call.group, call.peer
        if key not in self.across.rings:
            self.across.rings[key] = self._rings(call)
        return (self.across if self.across.rings[key] else self.inside).submit(call, collective)

    def _rings(self, call: comm.Call) -> int:
        """The number of such messages that leave this host at once; 0: it stays inside."""
        group, me = process_groups.global_ranks(group_named(call.group)), dist.get_rank()
        ends = group if call.peer is None else [me, group[call.peer]]
        if len(on_hosts(ends, self.per_host)) == 1:
            return 0
        return self.per_host // on_hosts(group, self.per_host)[me // self.per_host]

    def __enter__(self) -> HostLinks:
        _refuse_a_second()
        self.inside._open()
        self.across._open()
        comm.link = self
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        comm.link = None
        for link in (self.inside, self.across):
            link._close(abandon=error is not None)


class _SharedLink(EmulatedLink):
    """A link shared by several rings: `rings` is their number by group and peer, 0 for messages that do not use it."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        super().__init__(latency, bandwidth)
        self.rings: dict[tuple[str, int | None], int] = {}

    def seconds(self, call: comm.Call) -> float:
        return (
            0.0 if call.op == "recv" else self.latency + call.wire * self.rings[call.group, call.peer] / self.bandwidth
        )


def _refuse_a_second() -> None:
    if comm.link is not None:
        raise RuntimeError(
            "a link is installed already, or a Recorder is open: leave its `with` first (a Recorder goes inside)"
        )


def let_communication_go_first() -> None:
    """Lower this thread's priority below those that communicate, as kernels yield to NCCL's high-priority stream.

    If ranks compute on every core, a message that has arrived would otherwise wait for a core too. The change lasts for
    the life of the thread, since only root may undo it, and applies on Linux only.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def parse_link(text: str) -> EmulatedLink:
    """Parse a link such as `latency=200us,bandwidth=1GB/s`; bare numbers are seconds and bytes per second.

    Units: s, ms, us, ns; B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024), kbit, Mbit, Gbit, Tbit, each
    with or without `/s`.

    Raises:
        ValueError: the text does not have exactly this form; one line.
    """
    with _reading(text, "latency=200us,bandwidth=1GB/s"):
        return _link(_words(text, ("latency", "bandwidth")))


def parse_links(text: str) -> EmulatedLink | HostLinks:
    """Parse a link as `parse_link` does, or two, such as `inside=5us@10GB/s,across=200us@1GB/s,host=4`.

    The first is between ranks of a host, the second from host to host, and each host has 4 ranks (`HostLinks`).

    Raises:
        ValueError: the text has neither form; one line.
    """
    if not re.search(r"(^|,)\s*(inside|across|host)\s*=", text):
        return parse_link(text)
    with _reading(text, "inside=5us@10GB/s,across=200us@1GB/s,host=4"):
        words = _words(text, ("inside", "across", "host"))
        inside, across = (_speed(name, words[name]) for name in ("inside", "across"))
        if not words["host"].isdecimal() or int(words["host"]) < 1:
            raise ValueError(f"host {words['host']!r} is not a number of ranks from 1 up")
        return HostLinks(inside, across, int(words["host"]))


def _speed(name: str, value: str) -> EmulatedLink:
    latency, at, bandwidth = (piece.strip() for piece in value.partition("@"))
    if not at:
        raise ValueError(f"{name} {value!r} is not a latency and a bandwidth, with @ between them")
    return _link({"latency": latency, "bandwidth": bandwidth})


@contextmanager
def _reading(text: str, such_as: str) -> Iterator[None]:
    """Make of a reason the line that names the text and shows the form."""
    try:
        yield
    except ValueError as why:
        raise ValueError(f"bad link {text!r}: {why}; write for instance {such_as}") from None


def _words(text: str, names: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in names or name in values:
            known = " nor its one ".join(f"{each}=..." for each in names)
            raise ValueError(f"{part.strip()!r} is neither its one {known}")
        values[name] = value
    if missing := [name for name in names if name not in values]:
        raise ValueError(f"it has no {missing[0]}")
    return values


def _link(words: Mapping[str, str]) -> EmulatedLink:
    return EmulatedLink(**{name: _quantity(name, value) for name, value in words.items()})


def _quantity(name: str, value: str) -> float:
    units = _SECONDS if name == "latency" else _BYTES
    match = _NUMBER.fullmatch(value)
    if match is None or match[2] not in units or (match[3] and name == "latency"):
        names = ", ".join(unit for unit in units if unit)
        raise ValueError(f"{name} {value!r} is not a number from 0 up, alone or with one of {names}")
    return float(match[1]) * units[match[2]]
