"""Exercise 14.2: Micro-batches."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.references import reference

from .shared import EXACT, randn


@reference(
    "14.2",
    hints=(
        "The loss of the batch is a mean over its samples. What share of that mean comes from a micro-batch? Gradients "
        "add up in `.grad` by themselves. When can the activations of a micro-batch be freed?",
        "For each pair of `x.tensor_split(micros)` and `target.tensor_split(micros)`: compute the loss, scale it "
        "by len(rows) / len(x), and call `backward()` at once. Add up `loss.detach()`.",
    ),
)
def accumulate(
    forward: Callable[[Tensor], Tensor],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    target: Tensor,
    micros: int,
) -> Tensor:
    """Run the forward and backward passes of a batch in micro-batches, one after the other, from the first to the last.

    The parameters' `.grad` grows by the gradients of the entire batch. Autograd keeps the activations of at most one
    micro-batch at any time, and no output is kept after the next forward pass.

    Args:
        forward: the model. Do not change its mode.
        loss_fn: returns the mean loss over its samples.
        x: [samples, ..], such as tokens.
        target: [samples, ..].
        micros: m, at most the number of samples. Micro-batches are those of `tensor_split(m)`.

    Returns:
        The loss of the entire batch, a scalar tensor without a graph.
    """
    losses = []
    for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
        loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


class Memory(bytearray):
    """The bytes of a tensor, which are gone when no tensor and no graph needs them."""


def copy_into(memory, tensor):
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


@dataclass
class Log:
    """What a model has run, and what of earlier micro-batches was still in memory when a forward pass began."""

    ran: list[str] = field(default_factory=list)
    saved: list[weakref.ref[Tensor]] = field(default_factory=list)  # for the backward pass
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    most_saved: int = 0
    most_outputs: int = 0

    def look(self):
        self.most_saved = max(self.most_saved, sum(each() is not None for each in self.saved))
        self.most_outputs = max(self.most_outputs, sum(each() is not None for each in self.outputs))


class Logged(torch.autograd.Function):
    """Writes down when a micro-batch goes forward, and when backward; keeps a tensor for the backward pass."""

    @staticmethod
    def forward(ctx, x, name, log):
        ctx.log, ctx.name = log, name
        log.ran.append(f"F of {name}")
        log.look()
        kept, output = (Memory(x.nbytes) for _ in range(2))
        log.saved.append(weakref.ref(kept))
        log.outputs.append(weakref.ref(output))
        ctx.save_for_backward(copy_into(kept, x))
        return copy_into(output, x)

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        ctx.log.ran.append(f"B of {ctx.name}")
        return gradient * torch.ones_like(kept), None, None


def samples(places):
    """The name of a micro-batch by its samples' places in the batch."""
    first, last = places[0], places[-1]
    if places != list(range(first, last + 1)):
        return f"samples {', '.join(map(str, places))}"
    return f"samples {first} to {last}" if first != last else f"sample {first}"


def mean_loss(output, target):
    return (output - target).square().mean()


class Model(nn.Module):
    """Rows of a weight, looked up by tokens [samples] or [samples, 2]; the first column is a permutation of samples."""

    def __init__(self, size, shape, seed):
        super().__init__()
        self.weight = nn.Parameter(randn(size, 3, seed=seed))
        self.before = randn(size, 3, seed=seed + 3)
        self.weight.grad = self.before.clone()  # of an earlier batch
        draw = torch.Generator().manual_seed(seed + 1)
        columns = [torch.randperm(size, generator=draw) for _ in range(max([1, *shape]))]
        self.x = torch.stack(columns, 1).view(size, *shape)
        self.target = randn(*self.x.shape, 3, seed=seed + 2)
        self.place_of = {token: place for place, token in enumerate(columns[0].tolist())}
        self.log = Log()

    def forward(self, x):
        if x.shape[1:] != self.x.shape[1:]:
            raise AnswerError(
                f"a micro-batch of x with shape {list(self.x.shape)}: its shape is {list(x.shape)}\n"
                "likely slip: samples are the first dimension: `tensor_split` of x itself, not of all its elements"
            )
        places = [self.place_of[token] for token in x.reshape(len(x), -1)[:, 0].tolist()]
        return Logged.apply(F.embedding(x, self.weight), samples(places), self.log)

    def whole_batch(self, rows, weigh):
        """The gradient and the loss, if micro-batches of `rows` count as `weigh` says, and the last loss."""
        parts = zip(self.x.split(rows), self.target.split(rows), strict=True)
        losses = [mean_loss(F.embedding(a, self.weight), b) for a, b in parts]
        loss = sum(share * each for share, each in zip(weigh, losses, strict=True))
        return torch.autograd.grad(loss, self.weight)[0], loss.detach(), losses[-1].detach()


@check("14.2")
def check_accumulate(answer, variant):
    """Gradients and loss are those of the entire batch; one micro-batch is computed at a time."""
    sizes = [(8, 4), (variant.size, 3), (6, 4), (5, 1), (variant.size, variant.size)]
    for at, (size, micros) in enumerate(sizes):
        where = f"{size} samples in {micros} micro-batches"
        rows = [len(part) for part in torch.arange(size).tensor_split(micros)]
        model = Model(size, (2,) if at % 2 else (), variant.seed)
        given = model.x.clone(), model.target.clone()
        got = answer(model if at < 3 else lambda x, model=model: model(x), mean_loss, *given, micros)
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
            raise AnswerError(f"{where}: autograd is disabled afterwards\nlikely slip: use torch.no_grad() by `with`")
        expect(
            f"the model is in training mode, {where}",
            model.training,
            True,
            slip="the model is the caller's: leave its mode",
        )
        expect(f"x, after {where}", given[0], model.x, slip="x is the caller's: do not change it")
        expect(
            f"the target, after {where}", given[1], model.target, slip="the target is the caller's: do not change it"
        )
        check_log(model.log.ran, rows, where)
        check_memory(model.log, where)
        check_whole_batch(got, model, rows, where)


def check_whole_batch(got, model, rows, where):
    """The gradient of the weight, and the loss."""
    size, micros, before = sum(rows), len(rows), model.before
    wanted, loss, last = model.whole_batch(rows, [each / size for each in rows])
    means = model.whole_batch(rows, [1 / micros] * micros)
    sums = model.whole_batch(rows, [1.0] * micros)
    slips = {
        "each backward pass adds the gradient of a micro-batch's own mean: m times too much, unless it is scaled": (
            before + sums[0]
        ),
        "a micro-batch counts by its number of samples, and these numbers differ": before + means[0],
        "`.grad` was reset, but it held the gradients of an earlier batch": wanted,
        "the gradients are divided, and so are those that `.grad` had before": (before + sums[0]) / micros,
    }
    gradient = model.weight.grad if model.weight.grad is not None else torch.zeros(0)
    EXACT(f"the gradient of the weight, {where}", gradient, before + wanted, slips=slips)
    loss_slips = {
        "this is the sum of the micro-batches' losses": sums[1],
        "this is the mean of the micro-batches' losses; they have different numbers of samples": means[1],
        "this is the last micro-batch's loss": last,
        "this is the last micro-batch's share of the loss": last * rows[-1] / size,
    }
    if not isinstance(got, Tensor):
        raise AnswerError(f"the loss, {where}: expected a tensor, got {describe(got)}")
    EXACT(f"the loss, {where}", got.detach(), loss, slips=loss_slips)
    slip = "return a detached loss: a graph keeps all that it refers to in memory"
    expect(f"the loss has a graph, {where}", got.requires_grad, False, slip=slip)


def check_log(ran, rows, where):
    parts = torch.arange(sum(rows)).split(rows)
    wanted = [f"{kind} of {samples(part.tolist())}" for part in parts for kind in "FB"]
    expect(f"what ran, {where}", ran, wanted, slip=order_slip(ran, wanted, rows))


def order_slip(ran, wanted, rows):
    """The reason for other micro-batches, or for another order."""
    forwards, pairs = [each[5:] for each in ran if each[0] == "F"], list(zip(wanted[::2], wanted[1::2], strict=True))
    whole = samples(list(range(sum(rows))))
    sizes = [len(part) for part in torch.arange(sum(rows)).chunk(len(rows))]
    by_chunk = [samples(part.tolist()) for part in torch.arange(sum(rows)).split(sizes)]
    if not any(each[0] == "B" for each in ran):
        return "no backward pass ran"
    if whole in forwards and len(rows) > 1:
        return "this is a forward pass of the entire batch, with all its activations"
    if len(forwards) > len(set(forwards)):
        return "each micro-batch has one forward pass: compute its output once"
    if sorted(ran) == sorted(wanted):
        if ran == [each for pair in reversed(pairs) for each in pair]:
            return "the micro-batches run from the last to the first: begin with the first"
        if "B" not in [each[0] for each in ran[: len(rows)]]:
            return "all forward passes come first, so the activations of the entire batch are alive"
        if [each[0] for each in ran] == ["F", "B"] * len(rows):
            return "the micro-batches run in another order: begin with the first"
        return "a forward pass begins before the last backward pass has run, so activations of two are alive"
    if forwards == by_chunk:
        return "micro-batches are those of `tensor_split`: `chunk` makes different ones, sometimes fewer"
    if len(forwards) == len(rows) and "," in "".join(forwards):
        return "a micro-batch is of samples that follow each other, in the batch's order"
    return "micro-batches are those of `tensor_split`: sizes differ by one at most, and the larger ones come first"


def check_memory(log, where):
    """The graphs of all earlier micro-batches are gone, and their outputs but for the latest, which may have a name."""
    what = f"earlier micro-batches whose activations are in memory, {where}"
    log.look()
    slip = "their graphs are kept: call `backward()` without `retain_graph`"
    expect(what, log.most_saved, 0, slip=slip)
    expect(what, max(log.most_outputs, 1), 1, slip="their outputs are kept: add up their losses instead")
