"""What several exercises of lab 03 share."""

from contextlib import nullcontext

import torch
from torch import nn

from minifsdp import comm, device
from minifsdp.course.ladder.rungs import closed_form_setting

ROWS = 12  # of the whole batch: 1, 2, 3 and 4 ranks share them equally
STEPS = 3
LR = 0.05


def pad(flat, ranks):
    return torch.cat([flat, flat.new_zeros(-flat.numel() % ranks)])


class Net(nn.Module):
    """Layers of odd sizes; in float64, so that one process and N ranks agree to the last digits."""

    def __init__(self, seed, size):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in [(5, size), (size, 6), (6, size), (size, 1)])
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def whole_batches(seed, steps=STEPS):
    numbers = torch.Generator().manual_seed(seed + 1)
    draw = lambda columns: torch.randn(ROWS, columns, generator=numbers, dtype=torch.float64)  # noqa: E731
    return [(draw(5), draw(1)) for _ in range(steps)]


def loss_of(model, batch):
    x, y = (part.to(next(model.parameters()).device) for part in batch)
    return (model(x) - y).square().mean()


def my_rows(batch, group):
    return [part.chunk(group.size())[group.rank()] for part in batch]


def flatten(params, ranks):
    """The parameters' values, flat and padded."""
    return pad(torch.cat([p.detach().flatten() for p in params]), ranks)


def poison(buffer, role):
    """Uninitialized memory is not zero."""
    buffer.fill_(float("nan"))


class Watch:
    """What happens on this rank: collectives issued and waited for, and what else is noted."""

    def __init__(self):
        self.events = []
        self.open = self.most_open = 0

    def __call__(self, call, phase):
        self.events.append(f"{phase} {call.op}")
        self.open += 1 if phase == "issue" else -1
        self.most_open = max(self.most_open, self.open)
        return nullcontext()

    def __enter__(self):
        comm.observers.append(self)
        device.buffer_observers.append(poison)
        return self

    def __exit__(self, *exc):
        comm.observers.remove(self)
        device.buffer_observers.remove(poison)


def freed_by_resize(ledger, tag):
    """Bytes under a tag that `device.free` has given away."""
    return -sum(min(0, event.changes.get(tag, 0)) for event in ledger.events if event.cause == "resize_")


def received(padded, ranks):
    """Bytes that `comm` receives while a bucket is reduced, and frees: on gloo the other ranks' parts of it."""
    return closed_form_setting(ranks).reducing(padded) - padded // ranks
