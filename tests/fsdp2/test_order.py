"""Ranks that call FSDP2's units in different orders hear of it in a line, and none hangs."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifsdp import fsdp2
from minifsdp.instruments.launch import RankError, launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Net(nn.Module):
    """Two layers, in the order that the caller wants."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        for place in order:
            x = self.layers[place](x)
        return x


def train(swaps: bool) -> float:
    torch.manual_seed(0)
    net = Net()
    for layer in net.layers:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(net)
    order = [0, 1] if dist.get_rank() == 0 or not swaps else [1, 0]
    loss = net(torch.ones(2, 5), order).sum()
    loss.backward()
    return loss.item()


@pytest.fixture(autouse=True)
def detail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    monkeypatch.setenv("MINIFSDP_ORDER_TIMEOUT", "5")


def test_one_order_on_all_ranks_is_none_to_speak_of() -> None:
    assert len(set(launch(train, 2, False))) == 1


def test_two_orders_are_named_with_their_units() -> None:
    with pytest.raises(RankError) as error:
        launch(train, 2, True, timeout=60)
    said = "\n".join(error.value.failures.values())
    assert "layers.0 (Linear)" in said
    assert "layers.1 (Linear)" in said
