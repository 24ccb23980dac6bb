"""Exercise 0.4: What autograd keeps."""

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from minifsdp.course.workshop.checking import AnswerError, check, expect
from minifsdp.course.workshop.references import reference


@reference(
    "0.4",
    hints=(
        "`pack` is called for every tensor that an operator saves: note `tensor.untyped_storage()` there, in a dict "
        "from its `data_ptr()` to its `nbytes()`, so that a storage counts once. Collect the parameters' addresses "
        "before, to leave them out.",
        "`pack` hands back `tensor.detach()`: the same memory, without the graph that the tensor itself would hold. "
        "`unpack` hands back what it is given. After the `with`, sum the dict's values.",
    ),
)
def saved_bytes(forward: Callable[[], Tensor], model: nn.Module) -> int:
    """Return the bytes that autograd keeps for the backward pass when `forward` runs.

    Every storage that holds a saved tensor counts once, at its full size. The parameters, which
    autograd also saves, do not count: they exist anyway. Backward through the result must work as
    usual, and once the result is deleted, everything that was saved must be freed too.

    Args:
        forward: runs the model and returns its loss, whose graph holds all that was saved; call it once.
        model: the model; its parameters do not count.

    Returns:
        Bytes.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    del loss  # it held the graph, and with it all that was counted
    return sum(saved.values())


class Gated(nn.Module):
    """[rows, width] -> the same; a third of `up`'s output is unused, and one tensor is saved by two operators.

    Remembers, without keeping it alive, the memory of what forward has made.
    """

    def __init__(self, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * inner), nn.Linear(inner, width)

    def forward(self, x):
        value, gate, _ = self.up(x).chunk(3, dim=-1)
        opened = gate.sigmoid()
        product = value * opened
        y = self.down(product)
        self.made = [weakref.ref(tensor.untyped_storage()) for tensor in (value, opened, product, y)]
        return y


class Embedded(nn.Module):
    """[rows] of int64 -> [rows, width - 1] in float64; a part of a frozen weight, and a buffer of the table's shape."""

    def __init__(self, rows, width):
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.mix = nn.Parameter(torch.randn(width + 1, width), requires_grad=False)
        self.register_buffer("mask", torch.ones(rows, width))
        self.double()

    def forward(self, tokens):
        y = (self.table(tokens) * self.mask @ self.mix[1:]).exp()
        return y[:, 1:] * y[:, :-1]  # saves two views of one storage


@check("0.4")
def check_saved_bytes(answer, variant):
    """Every storage once and whole, no parameter, one forward; backward still works, and nothing is left behind."""
    torch.manual_seed(variant.seed)
    rows, width, inner = variant.size, 5, 3
    model, x = Gated(width, inner), torch.randn(rows, width)
    losses, ran = [], []

    def forward():
        ran.append(True)
        losses.append(model(x).square().mean())
        return losses[-1]

    model.eval()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    found = answer(forward, model)
    expect("calls of forward", len(ran), 1, slip="run forward once: each run saves its own tensors")
    left = {n: p.grad for n, p in model.named_parameters()}
    slip = "it only counts: gradients and modes of the model are the caller's, who runs backward"
    expect("gradients afterwards", left, {n: torch.ones_like(p) for n, p in model.named_parameters()}, slip=slip)
    expect("whether the model is in training mode afterwards", model.training, False, slip=slip)
    model.zero_grad()
    # x for up; the whole of up's output, of which `value` is a view; the sigmoid, for itself and the product; the
    # product for down; the output for the square.
    wanted = 4 * rows * (width + 3 * inner + inner + inner + width)
    double, part, weight = 4 * rows * inner, 4 * rows * 2 * inner, 4 * inner * width
    slips = {
        "the parameters are counted: they are there anyway": wanted + weight,
        "a tensor that two operators save is counted twice: count storages": wanted + double,
        "a view keeps its whole storage alive: count the storage's bytes": wanted - part,
        "views at their own size, and twice what two operators save: count storages": wanted - part + double,
        "everything is counted at every saving, parameters too (a weight is saved as a view of it: compare storages, "
        "not tensors)": wanted - part + double + weight,
        "elements against bytes": wanted // 4,
        "nothing was counted: hooks work on what runs inside their `with`": 0,
    }
    expect(f"bytes saved by a gated layer for {rows} rows", found, wanted, slips=slips)
    kept = sum(storage() is not None for storage in model.made)
    slip = "`pack` handed back a copy, which autograd then keeps beside what was counted: hand back the tensor's memory"
    expect("of four activations, those that the graph keeps", kept, 4, slip=slip)
    _expect_backward("a gated layer", losses.pop(), model, lambda: model(x).square().mean())
    answer(lambda: model(x).square().mean(), model)
    gc.collect()
    left = sum(storage.nbytes() for made in model.made if (storage := made()) is not None)
    slip = (
        "`pack` handed back the tensor itself, and graph and tensor keep each other alive: hand back tensor.detach(); "
        "or something outside still holds them"
    )
    expect("bytes of activations left once the loss is gone", left, 0, slip=slip)
    _expect_embedded(answer, rows, width)


def _expect_embedded(answer, rows, width):
    """What a model of floating point in 4 bytes does not show."""
    model, tokens = Embedded(rows, width), torch.arange(rows)
    losses = []
    found = answer(lambda: losses.append(model(tokens).sum()) or losses[-1], model)
    wanted = 8 * rows * (1 + width + width)  # the tokens, the buffer, and exp's output
    slips = {
        "a buffer is no parameter: where an operator saves it, it counts": wanted - 8 * rows * width,
        "a frozen parameter is one too, and a part of one is known by its storage: it is there anyway": wanted
        + 8 * (width + 1) * width,
        "an element has not always 4 bytes: ask the storage": wanted // 2,
        "indices are saved as well: what counts is memory, not floating point": wanted - 8 * rows,
    }
    slip = "parameters are known by their storage, and each call counts what it has seen itself"
    expect(f"bytes saved by an embedding of {rows} tokens in float64", found, wanted, slips=slips, slip=slip)
    _expect_backward("an embedding in float64", losses.pop(), model, lambda: model(tokens).sum())


def _expect_backward(what, loss, model, forward):
    """Twice through the graph that was counted, against once through another one, twice as long."""
    slip = "`unpack` has to give back the tensor that `pack` was given, each time that it is called"
    try:
        loss.backward(retain_graph=True)
        loss.backward()
    except Exception as error:
        said = str(error).splitlines()[0]
        raise AnswerError(f"backward after it raises {type(error).__name__}: {said}\nlikely slip: {slip}") from None
    got = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    (2 * forward()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    expect(f"{what}: gradients of two backward passes after it", got, wanted, slip=slip)
