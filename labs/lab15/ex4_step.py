"""Exercise 15.4: A step on three axes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minifsdp import comm
from minifsdp.comm import Group
from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, on_ranks
from minifsdp.course.workshop.references import reference
from minifsdp.instruments.launch import rank_device
from minifsdp.mesh import Mesh

from .shared import EXACT, randn


@reference(
    "15.4",
    hints=(
        "Write two loops over the micro-batches. The first one receives, computes and sends; it keeps input and output "
        "of each micro-batch. The second one receives a gradient, calls `backward` and sends the input's gradient. "
        "Which of these parts does the first stage leave out, and which the last?",
        "An input that arrives needs `requires_grad_()` after `recv(...).wait()`. On the last stage, keep `loss / m` "
        "instead of the output, and call `backward()` without a gradient. Elsewhere, `gradient = buffer()`, "
        "`comm.recv(gradient, pp.rank() + 1, pp).wait()`, `output.backward(gradient)`. Send `output.detach()` forward "
        "and `x.grad` backward.",
    ),
)
def step(
    stage: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
    loss_of: Callable[[Tensor, int], Tensor],
    buffer: Callable[[], Tensor],
    pp: Group,
    reduce: Callable[[], None],
) -> list[Tensor]:
    """Run a step on this rank up to its gradients: all forward passes, all backward passes, one reduction.

    Args:
        stage: this rank's layers. The ranks of its tp group compute them together.
        inputs: m micro-batches of tokens, of equal size. Only the first stage has a use for them; the others receive
            their inputs.
        loss_of: `loss_of(output, i)` is the mean loss of micro-batch i, from the last stage's output.
        buffer: returns a new tensor that fits the activations between two stages, and their gradients.
        pp: the ranks of the pipeline, in the order of their stages. `comm.send(x, to, pp).wait()` and `comm.recv(x,
            source, pp).wait()` take ranks of this group.
        reduce: your 15.3, which expects the gradients of all micro-batches.

    Returns:
        The detached losses of the micro-batches on the last stage, and an empty list elsewhere. Parameters have no
        gradients before the step. Afterwards these are the gradients of the mean loss of the batch.
    """
    rank, last = pp.rank(), pp.size() - 1
    kept, losses = [], []
    for i, tokens in enumerate(inputs):
        x = tokens
        if rank > 0:
            x = buffer()
            comm.recv(x, rank - 1, pp).wait()
            x.requires_grad_()
        y = stage(x)
        if rank < last:
            comm.send(y.detach(), rank + 1, pp).wait()
        else:
            loss = loss_of(y, i)
            losses.append(loss.detach())
            y = loss / len(inputs)
        kept.append((x, y))
    for x, y in kept:
        if rank < last:
            gradient = buffer()
            comm.recv(gradient, rank + 1, pp).wait()
            y.backward(gradient)
        else:
            y.backward()
        if rank > 0:
            assert x.grad is not None
            comm.send(x.grad, rank - 1, pp).wait()
    reduce()
    return losses


WIDTH, HIDDEN, TOKENS, ROWS = 4, 12, 11, 3  # ROWS: of a micro-batch
STUCK = "a message has no receiver, or a receive has no message: each stage sends m times to each neighbour"
CASES = ((Mesh(pp=2, dp=2, tp=2), 3), (Mesh(pp=3, tp=2), 2), (Mesh(dp=2), 2))


def weights_of(stage, seed):
    """The stage's two matrices, whole."""
    return randn(WIDTH, HIDDEN, seed=seed + 1, rank=stage) / 2, randn(HIDDEN, WIDTH, seed=seed + 2, rank=stage) / 2


def embedding(seed):
    return randn(TOKENS, WIDTH, seed=seed + 3)


def batch_of(replica, micros, seed):
    """Tokens and targets of a replica's micro-batches."""
    draw = torch.Generator().manual_seed(1000 * seed + replica)
    tokens = torch.randint(TOKENS, (micros, ROWS), generator=draw)
    return tokens, randn(micros, ROWS, WIDTH, seed=seed + 4, rank=replica)


def loss_between(y, target):
    return (y - target).square().mean()


class Enter(torch.autograd.Function):
    """f: the gradient of what all tensor-parallel ranks use is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        comm.all_reduce(total, ctx.tp).wait()
        return total, None


class Leave(torch.autograd.Function):
    """g: the sum of the ranks' partial sums."""

    @staticmethod
    def forward(ctx, x, tp):
        total = x.clone()
        comm.all_reduce(total, tp).wait()
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Logged(torch.autograd.Function):
    """Writes down when a backward pass goes through."""

    @staticmethod
    def forward(ctx, x, ran):
        ctx.ran = ran
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.ran.append("B")
        return gradient, None


def observe_step(answer, mesh, micros, seed):
    rank, device = comm.world().rank(), rank_device()
    groups = {axis: each.get_group() for axis, each in mesh.device_meshes(device.type, ("pp", "dp", "tp")).items()}
    place = {axis: mesh.place(rank, axis) for axis in ("pp", "dp", "tp")}
    up, down = weights_of(place["pp"], seed)
    parts = {"up": up.chunk(mesh.tp, 1)[place["tp"]], "down": down.chunk(mesh.tp, 0)[place["tp"]]}
    parts |= {"embed": embedding(seed)} if place["pp"] == 0 else {}
    parameters = {name: part.contiguous().to(device).requires_grad_() for name, part in parts.items()}
    ran, received, (tokens, targets) = [], [], (each.to(device) for each in batch_of(place["dp"], micros, seed))

    def stage(x):
        if x.is_floating_point() == (place["pp"] == 0):
            raise AnswerError(
                f"the input of stage {place['pp']}: expected {'tokens' if place['pp'] == 0 else 'activations'}, got "
                f"{describe(x)}\nlikely slip: only the first stage takes `inputs`; the others receive their inputs"
            )
        if place["pp"] > 0:
            check_input(x, received)
            received.append(x)
        ran.append("F")
        x = parameters["embed"][x] if place["pp"] == 0 else x
        hidden = torch.tanh(Enter.apply(x, groups["tp"]) @ parameters["up"])
        return Logged.apply(x + Leave.apply(hidden @ parameters["down"], groups["tp"]), ran)

    def reduce():
        ran.append("reduce")
        for p in parameters.values():
            if p.grad is not None:
                comm.all_reduce(p.grad, groups["dp"], comm.MEAN).wait()

    def buffer():
        return torch.full((ROWS, WIDTH), float("nan"), dtype=torch.float64, device=device)

    with comm.record() as calls:
        losses = answer(stage, list(tokens), lambda y, i: loss_between(y, targets[i]), buffer, groups["pp"], reduce)
    if not isinstance(losses, list | tuple) or not all(isinstance(each, Tensor) for each in losses):
        raise AnswerError(f"expected a list of losses, got {describe(losses)}")
    sent = [call.op for call in calls if call.group == groups["pp"].group_name and call.op in ("send", "recv")]
    gradients = {name: p.grad for name, p in parameters.items()}
    graph = any(each.requires_grad for each in losses)
    messages = {op: sent.count(op) for op in ("send", "recv")}
    return place, [float(each.detach()) for each in losses], graph, gradients, ran, messages


def check_input(x, before):
    """An input that arrived is a leaf of this stage's graph, in memory of its own."""
    if not x.requires_grad:
        raise AnswerError(
            "the input of a later stage does not require grad, so there is no gradient to send back\n"
            "likely slip: call `requires_grad_()` on an input that has arrived"
        )
    if any(x.data_ptr() == other.data_ptr() for other in before):
        raise AnswerError(
            "two micro-batches have arrived in the same memory\nlikely slip: call `buffer()` for each micro-batch: its "
            "backward pass needs the input that the next one would overwrite"
        )


def one_process(mesh, micros, seed, weigh, loss_between=loss_between):
    """The gradients of all stages, if micro-batches count as `weigh` says; and the losses of each replica."""
    stages = [[each.requires_grad_() for each in weights_of(stage, seed)] for stage in range(mesh.pp)]
    embed = embedding(seed).requires_grad_()
    losses = {}
    for replica in range(mesh.dp):
        tokens, targets = batch_of(replica, micros, seed)
        found = []
        for row, target in zip(tokens, targets, strict=True):
            x = embed[row]
            for up, down in stages:
                x = x + torch.tanh(x @ up) @ down
            found.append(loss_between(x, target))
        losses[replica] = torch.stack(found)
    total = torch.stack([each @ torch.tensor(weigh, dtype=torch.float64) for each in losses.values()]).mean()
    flat = torch.autograd.grad(total, [embed, *(each for pair in stages for each in pair)])
    return flat[0], list(zip(flat[1::2], flat[2::2], strict=True)), {r: each.tolist() for r, each in losses.items()}


def of_rank(found, mesh, place):
    """A rank's part of the gradients of all stages."""
    embed, stages, _ = found
    up, down = stages[place["pp"]]
    mine = {"up": up.chunk(mesh.tp, 1)[place["tp"]], "down": down.chunk(mesh.tp, 0)[place["tp"]]}
    return mine | ({"embed": embed} if place["pp"] == 0 else {})


@check("15.4")
def check_step(answer, variant):
    """Losses and gradients equal those of one process; messages go between neighbours; one reduction comes last."""
    for mesh, micros in (*CASES, (Mesh(pp=variant.ranks), variant.size)):
        where = f"pp={mesh.pp}, dp={mesh.dp}, tp={mesh.tp}, {micros} micro-batches"
        seen = on_ranks(mesh.ranks, observe_step, answer, mesh, micros, variant.seed, slip=STUCK)
        right = one_process(mesh, micros, variant.seed, [1 / micros] * micros)
        ones = one_process(mesh, micros, variant.seed, [1.0] * micros)
        newest = one_process(mesh, micros, variant.seed, [0.0] * (micros - 1) + [1.0 / micros])
        by_stages = one_process(mesh, micros, variant.seed, [1 / micros / mesh.pp] * micros)
        of_outputs = one_process(mesh, micros, variant.seed, [1.0] * micros, lambda y, _: y.sum())
        for rank, (place, losses, graph, gradients, ran, messages) in enumerate(seen):
            own = right[2][place["dp"]] if place["pp"] == mesh.pp - 1 else []
            slips = {
                "these are the shares that are divided by m; return the micro-batches' losses": [
                    x / micros for x in own
                ],
                "the last stage has a loss for each micro-batch": [],
            }
            expect(
                f"losses, {where}", losses, own, rank=rank, slips=slips, slip="the others have none", tolerance=1e-12
            )
            expect(f"losses have a graph, {where}", graph, False, rank=rank, slip="return detached losses")
            wanted = ["F"] * micros + ["B"] * micros + ["reduce"]
            expect(f"what ran, {where}", ran, wanted, rank=rank, slip=slip_of_passes(ran, micros))
            wrong = {
                "each backward pass adds a micro-batch's own mean: divide each loss by m": ones,
                "this is the last micro-batch only: keep the inputs and outputs of all": newest,
                "divide each loss by m only: stages are no samples, and p does not come in": by_stages,
                "the last stage's `backward` begins at the loss: this is the gradient of the output's sum": of_outputs,
            }
            parts = {text: of_rank(each, mesh, place) for text, each in wrong.items()}
            for name, wanted in of_rank(right, mesh, place).items():
                got = gradients[name] if gradients[name] is not None else torch.zeros(0)
                named = {text: each[name] for text, each in parts.items()}
                EXACT(f"gradient of {name}, stage {place['pp']}, {where}", got, wanted, rank=rank, slips=named)
            sends = micros * ((place["pp"] > 0) + (place["pp"] < mesh.pp - 1))
            wanted = {"send": sends, "recv": sends}
            slip = "one message for each micro-batch, to each neighbour and from it"
            expect(f"messages along the pipeline, {where}", messages, wanted, rank=rank, slip=slip)


def slip_of_passes(ran, micros):
    """The fault in the order of passes."""
    if (reductions := ran.count("reduce")) > 1:
        return f"`reduce` is called {reductions} times: gradients add up over the micro-batches, and are reduced once"
    if "reduce" in ran and ran[-1] != "reduce":
        return "`reduce` expects the gradients of all micro-batches: call it after the last backward pass"
    if not reductions:
        return "`reduce` is never called"
    if ran.count("B") < micros:
        return "a micro-batch has no backward pass"
    if ran.count("F") > micros:
        return "each micro-batch has one forward pass"
    return "all forward passes come first: one micro-batch after another leaves the other stages idle"
