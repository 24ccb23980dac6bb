"""The allocator's history, as it is drawn, against the allocator's own statistics before and after."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from on_gpu import ON_GPU

from minifsdp.instruments.watch.cuda_memory import MemoryHistory

pytestmark = ON_GPU
MIB = 2**20


def test_history_equals_the_statistics_of_the_allocator(tmp_path: Path) -> None:
    where = torch.device("cuda", 0)
    names = ("requested_bytes.all.current", "reserved_bytes.all.current")
    kept, freed = torch.ones(700, device=where), torch.ones(3 * MIB, device=where)
    torch.cuda.synchronize()
    before = [torch.cuda.memory_stats(where)[name] for name in names]
    with MemoryHistory(where, tmp_path / "snapshot.pickle") as history:
        history.mark("forward")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            freed.mul_(2)
        freed.record_stream(side)
        del freed
        made = kept.new_zeros(40 * MIB)
    after = [torch.cuda.memory_stats(where)[name] for name in names]
    drawn = history.curve
    assert drawn is not None
    assert [drawn["active"][0], drawn["reserved"][0]] == before
    assert [drawn["active"][-1], drawn["reserved"][-1]] == after
    assert max(drawn["reserved"]) == history.peaks["reserved"]
    assert max(drawn["allocated"]) <= history.peaks["allocated"]
    gap = max(active - allocated for active, allocated in zip(drawn["active"], drawn["allocated"], strict=True))
    assert gap >= 12 * MIB, "what another stream was using waited"
    assert 0 <= drawn["marks"][0][0] <= drawn["us"][-1]
    assert pickle.loads((tmp_path / "snapshot.pickle").read_bytes())["device_traces"]
    del made
