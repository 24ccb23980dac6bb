"""The checks of lab 14."""

import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, combinations, pairwise
from numbers import Integral
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, on_ranks, same
from minifsdp.pipeline.actions import Action, check_complete

EXACT = partial(expect, tolerance=1e-12)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def as_text(actions):
    return " ".join(map(str, actions))


# 14.1


def slowest(costs, counts):
    return max(stages(costs, counts))


def all_counts(layers, ranks):
    for cuts in combinations(range(1, layers), ranks - 1):
        yield [end - begin for begin, end in zip((0, *cuts), (*cuts, layers), strict=True)]


def best_counts(costs, ranks, worse=slowest):
    return min(all_counts(len(costs), ranks), key=lambda counts: (worse(costs, counts), counts))


def stages(costs, counts):
    begins = [sum(counts[:rank]) for rank in range(len(counts))]
    return [sum(costs[begin : begin + count]) for begin, count in zip(begins, counts, strict=True)]


def squares(costs, counts):
    return sum(each**2 for each in stages(costs, counts))


def spread(costs, counts):
    return max(stages(costs, counts)) - min(stages(costs, counts))


def by_number(costs, ranks):
    """As many layers for each rank; the first ones one more."""
    return [len(part) for part in torch.arange(len(costs)).tensor_split(ranks)]


def until_average(costs, ranks):
    """Stages that are closed as soon as they have reached the average; the last one has the rest."""
    return filled_in_turn(costs, ranks, lambda filled, cost: filled >= sum(costs) / ranks)


def within_average(costs, ranks):
    """Stages that are closed before they pass the average; the last one has the rest."""
    return filled_in_turn(costs, ranks, lambda filled, cost: filled + cost > sum(costs) / ranks)


def filled_in_turn(costs, ranks, is_full):
    counts, filled = [0], 0.0
    for cost in costs:
        if counts[-1] and is_full(filled, cost) and len(counts) < ranks:
            counts.append(0)
            filled = 0.0
        counts[-1] += 1
        filled += cost
    return counts


def rest_to_the_last(costs, ranks):
    each = len(costs) // ranks
    return [each] * (ranks - 1) + [len(costs) - each * (ranks - 1)]


def at_shares(costs, ranks):
    """Cuts where the sum of the costs passes a multiple of the average."""
    counts = [0] * ranks
    passed = 0.0
    for cost in costs:
        counts[min(ranks - 1, int(passed * ranks / (sum(costs) or 1)))] += 1
        passed += cost
    return counts


def nearest_to_shares(costs, ranks):
    """Cuts where the sum of the costs is nearest to a multiple of the average."""
    sums, cuts = [0, *accumulate(costs)], [0]
    for rank in range(1, ranks):
        options = range(cuts[-1] + 1, len(costs) - (ranks - rank) + 1)
        cuts.append(min(options, key=lambda at: abs(sums[at] - sums[-1] * rank / ranks)))
    return [end - begin for begin, end in pairwise([*cuts, len(costs)])]


def halves(costs, ranks):
    """The list cut in two as equally as possible, and each part again."""
    if ranks == 1:
        return [len(costs)]
    left = ranks // 2
    options = range(left, len(costs) - (ranks - left) + 1)
    cut = min(options, key=lambda at: abs(sum(costs[:at]) - sum(costs) * left / ranks))
    return halves(costs[:cut], left) + halves(costs[cut:], ranks - left)


PLACED = [
    ([4, 5, 9, 1, 1], 3),
    ([0.5, 1, 1, 1, 1, 1, 1, 2.5], 4),  # embedding, blocks and a head
    ([1] * 8, 4),
    ([1] * 7, 3),
    ([1] * 6, 3),
    ([0, 2, 0, 3, 0, 0], 2),
    ([0.4, 0.3, 2.5, 3, 3], 2),
    ([1.6, 0.8, 2, 0.1, 2.1], 2),
    ([0.34, 0.43, 0.16, 0.12], 2),
    ([0.055, 0.05, 0.019, 0.012, 0.025, 0.015], 3),  # seconds
    ([9, 1, 1, 1], 2),
    ([1, 1, 1, 9], 3),
    ([1, 9, 1, 9, 1], 3),
    ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 4),
    ([4, 4, 4, 4, 6, 6], 3),
    ([5, 2, 3], 3),
    ([7], 1),
    ([3, 1, 0, 1, 3, 1, 2], 5),
    ([0, 1, 3, 1, 2, 1, 2], 4),
]


def drawn_costs(seed):
    """Small lists of every length, for every number of ranks: whole numbers, fractions, microseconds and millions."""
    draw = Random(seed)
    kinds = [
        lambda: draw.choice([0, 1, 1, 1, 2, 3]),
        lambda: draw.randint(1, 9),
        lambda: draw.expovariate(1.0),
        lambda: draw.uniform(1e-6, 9e-6),
        lambda: draw.uniform(1e6, 4e6),
    ]
    for layers in range(2, 10):
        for ranks in range(2, min(layers, 6) + 1):
            for kind in kinds * 2:
                yield [kind() for _ in range(layers)], ranks
    yield [0, 0, 0], 2


@check("14.1")
def check_place(answer, variant):
    """Every rank has consecutive layers, and the slowest stage is as fast as it can be."""
    drawn = [1 + abs(each) for each in randn(variant.size, seed=variant.seed).tolist()]
    compare_placements(answer, [*PLACED, (drawn, variant.ranks)])
    compare_placements(answer, list(drawn_costs(variant.seed)))


def compare_placements(answer, cases):
    found = [placed(answer, costs, ranks) for costs, ranks in cases]
    faults = [misplaced_layers(*case, got) for case, got in zip(cases, found, strict=True)]
    if not any(faults):
        return
    slips = made_everywhere(found, [placing_slips(*case, got) for case, got in zip(cases, found, strict=True)])
    at = next(at for at, fault in enumerate(faults) if fault)
    (costs, ranks), got = cases[at], found[at]
    expect(placing(costs, ranks), got, best_counts(costs, ranks), slips=slips[at], slip=faults[at])


def misplaced_layers(costs, ranks, got):
    """What is wrong with a placement, None if it is one of the best."""
    if len(got) != ranks or sum(got) != len(costs):
        return "each layer is on one rank, and each rank has one number in the list"
    if min(got) < 1:
        return "a stage without a layer: its rank would only pass tensors on"
    if not is_best(costs, ranks, got):
        least = slowest(costs, best_counts(costs, ranks))
        return f"the slowest stage costs {slowest(costs, got):g} instead of {least:g}"
    return None


def placing(costs, ranks):
    return f"layers on each of {ranks} ranks, costs {describe(costs)}"


def placed(answer, costs, ranks):
    """The learner's list of numbers."""
    given, where = list(costs), placing(costs, ranks)
    got = answer(given, ranks)
    expect(f"the costs, after {where}", given, list(costs), slip="the list is the caller's: copy it")
    if not isinstance(got, list | tuple) or not all(type(count) is int for count in got):
        raise AnswerError(f"{where}: expected a number of layers for each rank, got {describe(got)}")
    return list(got)


def made_everywhere(found, slips):
    """The slips of each case, without those that explain one case and not another."""
    pairs = list(zip(found, slips, strict=True))
    made = {text for text in slips[0] if all(got == each[text] for got, each in pairs)}
    return [{text: each[text] for text in made} for each in slips]


def placing_slips(costs, ranks, got):
    """The results of mistakes. The first three start from a right placement; there may be several right ones."""
    layers = len(costs)
    undone = {
        "these are the ranks' first layers; return numbers of layers": [
            end - begin for begin, end in pairwise([*got, layers])
        ],
        "these are the ends of the ranks' layers; return numbers of layers": [
            end - begin for begin, end in pairwise([0, *got])
        ],
        "this is the placement, with the ranks from last to first": got[::-1],
    }
    whole = {
        "costs need not be whole numbers, and here they are rounded down": [int(cost) for cost in costs],
        "costs need not be whole numbers, and here they are rounded": [round(cost) for cost in costs],
        "costs are fractions of any size, and here they are rounded": [round(cost, 1) for cost in costs],
    }
    return {text: got if is_best(costs, ranks, counts) else None for text, counts in undone.items()} | {
        "every rank has the same number of layers, whatever they cost": by_number(costs, ranks),
        "every rank has the same number of layers, and the rest is on the last, whatever they cost": rest_to_the_last(
            costs, ranks
        ),
        "a stage closed as soon as it has reached the average leaves too little or too much for the others": (
            until_average(costs, ranks)
        ),
        "a stage closed before it passes the average leaves too much for the last": within_average(costs, ranks),
        "a layer across a share of the total may belong on either side of the cut": at_shares(costs, ranks),
        "cuts nearest to equal shares of the total: a cut that is best alone may be bad for the stages after it": (
            nearest_to_shares(costs, ranks)
        ),
        "the list is halved, and each half again: the best first cut depends on all others": halves(costs, ranks),
        "this minimizes the sum of the squares; a step waits for the slowest stage": best_counts(costs, ranks, squares),
        "this minimizes the difference between the slowest and the fastest stage; a step waits for the slowest": (
            best_counts(costs, ranks, spread)
        ),
        **{text: got if is_best(rounded, ranks, got) else None for text, rounded in whole.items()},
    }


def is_best(costs, ranks, counts):
    if len(counts) != ranks or sum(counts) != len(costs) or min(counts) < 1:
        return False
    return slowest(costs, counts) <= slowest(costs, best_counts(costs, ranks)) * (1 + 1e-9)


# 14.2


class Memory(bytearray):
    """The bytes of a tensor, which are gone when no tensor and no graph needs them."""


def copy_into(memory, tensor):
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)


@dataclass
class Log:
    """What a model has run, and what of earlier micro-batches was still in memory when a forward pass began."""

    ran: list[str] = field(default_factory=list)
    saved: list[weakref.ref] = field(default_factory=list)  # for the backward pass
    outputs: list[weakref.ref] = field(default_factory=list)
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


# 14.3 and 14.4

SIZES = [(4, 8), (4, 4), (2, 3), (4, 2), (1, 3), (3, 1), (5, 7)]  # ranks, micro-batches
SIZES += [(ranks, micros) for ranks in range(1, 7) for micros in range(1, 10) if (ranks, micros) not in SIZES]


def listed(answer, rank, ranks, micros):
    """The learner's list, of actions."""
    got = answer(rank, ranks, micros)
    if not isinstance(got, list | tuple) or not all(isinstance(each, Action) for each in got):
        shown = next((each for each in got if not isinstance(each, Action)), got) if isinstance(got, list) else got
        raise AnswerError(f"rank {rank} of {ranks}: expected a list of Action, got {describe(shown)}")
    for each in got:
        for name in ("stage", "micro"):
            number = getattr(each, name)
            if not isinstance(number, Integral) or isinstance(number, bool):
                raise AnswerError(
                    f"rank {rank} of {ranks}, {each}: expected an int for `{name}`, got {number!r}\n"
                    f"likely slip: `{name}` is of type {type(number).__name__}; such actions may only look the same"
                )
    return got


def compare_lists(answer, variant, right, slips_of):
    for ranks, micros in dict.fromkeys([*SIZES, (variant.ranks, variant.size)]):
        plan, given = [], []
        for rank in range(ranks):
            given.append(listed(answer, rank, ranks, micros))
            plan.append(list(given[-1]))
        slip = "each call returns a new list, and leaves those of earlier calls as they are"
        lengths = [len(each) for each in given]
        expect(f"lengths of the lists of {ranks} ranks", lengths, [len(each) for each in plan], slip=slip)
        slips = [slips_of(rank, ranks, micros) for rank in range(ranks)]
        made = [text for text in slips[0] if plan == [each[text] for each in slips]]  # the same slip on all ranks
        for rank, got in enumerate(plan):
            what = f"rank {rank} of {ranks}, {micros} micro-batches"
            wanted = as_text(right(rank, ranks, micros))
            named = {text: as_text(slip) for text, slip in slips[rank].items() if text in (made or slips[0])}
            if not made and any(plan[each] == right(each, ranks, micros) for each in range(ranks)):
                named = {f"the lists of other ranks are right; here: {text}": slip for text, slip in named.items()}
            expect(what, as_text(got), wanted, slips=named, slip=usual_slip(plan, rank, ranks, micros))


def usual_slip(plan, rank, ranks, micros):
    """The fault of a list that no known mistake explains."""
    if strange := [each for each in plan[rank] if each.kind not in ("F", "B")]:
        return f"{strange[0]} is of kind {strange[0].kind!r}: a forward pass is 'F', and a full backward pass is 'B'"
    foreign = [each for each in plan[rank] if each.stage != rank]
    if foreign and len(foreign) == len(plan[rank]) and rank:
        return f"{foreign[0]} is of stage {foreign[0].stage}; rank {rank} has stage {rank}"
    if foreign:
        return f"rank {rank} has only stage {rank}, and {foreign[0]} is another rank's"
    try:
        check_complete(plan, ranks, micros)
    except ValueError as error:
        return str(error)
    try:
        timed(plan, {"F": 1, "B": 2})
    except StuckError as stuck:
        return f"it is a deadlock: {stuck}"
    for kind, name in (("F", "forward"), ("B", "backward")):
        order = [each.micro for each in plan[rank] if each.kind == kind]
        if order != sorted(order):
            return f"{name} passes go from micro-batch 0 to the last: {order[:8]}"
    return None


def forwards(rank, micros):
    return [Action(rank, "F", micro) for micro in range(micros)]


def backwards(rank, micros):
    return [Action(rank, "B", micro) for micro in range(micros)]


def right_gpipe(rank, ranks, micros):
    return forwards(rank, micros) + backwards(rank, micros)


def gpipe_slips(rank, ranks, micros):
    both = [Action(rank, kind, micro) for micro in range(micros) for kind in "FB"]
    later = backwards(rank, micros)
    return {
        "backward passes begin with micro-batch 0 here, as in torch: the other order works, too, but all ranks must "
        "agree": forwards(rank, micros) + later[::-1],
        "a backward pass after each forward pass: the next micro-batch waits, so only one is ever in progress": both,
        "a rank has one stage and all micro-batches: the two were swapped": [
            Action(micro, kind, rank) for kind in "FB" for micro in range(micros)
        ],
        "the backward pass cannot come before the forward pass": later + forwards(rank, micros),
        "a forward pass without a backward pass trains nothing": forwards(rank, micros),
        "this is 1F1B, the next exercise: here, all forward passes come first": right_one_f_one_b(rank, ranks, micros),
    }


@check("14.3")
def check_gpipe(answer, variant):
    """All forwards, then all backwards, on every rank."""
    compare_lists(answer, variant, right_gpipe, gpipe_slips)


def pairs_after(rank, micros, ahead, newest=False, backward_first=False):
    """`ahead` forwards, then pairs, then the backwards that are left."""
    ahead = max(0, min(ahead, micros))
    first, then = forwards(rank, micros), backwards(rank, micros)
    if newest:
        then = then[ahead:] + then[:ahead]
    pairs = list(zip(first[ahead:], then, strict=False))
    middle = [each for pair in pairs for each in (pair[::-1] if backward_first else pair)]
    return first[:ahead] + middle + then[len(pairs) :]


def right_one_f_one_b(rank, ranks, micros):
    return pairs_after(rank, micros, ranks - 1 - rank)


def one_f_one_b_slips(rank, ranks, micros):
    ahead = ranks - 1 - rank
    right = pairs_after(rank, micros, ahead)
    return {
        "all forward passes first: this is GPipe": right_gpipe(rank, ranks, micros),
        "forward and backward passes in turn, without a warm-up: each waits for the full round trip": (
            pairs_after(rank, micros, 0)
        ),
        "the last rank needs no warm-up: count the ranks after this one, not those before it": pairs_after(
            rank, micros, rank
        ),
        "the warm-up has one forward pass too many: the pair itself begins with one": pairs_after(
            rank, micros, ahead + 1
        ),
        "the warm-up has one forward pass too few: the rank waits for the first gradient while it could go on": (
            pairs_after(rank, micros, ahead - 1)
        ),
        "every rank has the warm-up of the first, and holds as many micro-batches": pairs_after(
            rank, micros, ranks - 1
        ),
        "the gradient that comes back first is that of the oldest micro-batch, not of the newest": pairs_after(
            rank, micros, ahead, newest=True
        ),
        "in a pair, the forward pass comes first": pairs_after(rank, micros, ahead, backward_first=True),
        "a warm-up of two forward passes for each later rank is for interleaved stages": pairs_after(
            rank, micros, 2 * ahead
        ),
        "the remaining backward passes at the end are missing": right[: len(right) - min(ahead, micros)],
    }


@check("14.4")
def check_one_f_one_b(answer, variant):
    """Forwards ahead, one forward and one backward in turn, then the backwards that are left: as torch's list."""
    try:
        compare_lists(answer, variant, right_one_f_one_b, one_f_one_b_slips)
    except AnswerError as error:
        raise few_micro_batches(answer, error) from None


def few_micro_batches(answer, error):
    """The same error; if lists are right wherever m >= p, with the reason for that."""
    enough = [(ranks, micros) for ranks, micros in SIZES if micros >= ranks]
    if "likely slip" in str(error) and all(
        listed(answer, rank, ranks, micros) == right_one_f_one_b(rank, ranks, micros)
        for ranks, micros in enough
        for rank in range(ranks)
    ):
        first = str(error).splitlines()[0]
        return AnswerError(f"{first}\nlikely slip: there may be fewer micro-batches than ranks after this one")
    return error


# 14.5


class StuckError(Exception):
    """A deadlock; says who waits for what."""


def inputs_of(action, last):
    stage, kind, micro = action
    if kind == "F":
        return [Action(stage - 1, "F", micro)] if stage else []
    return [Action(stage, "F", micro)] + ([Action(stage + 1, "B", micro)] if stage < last else [])


def last_stage(plan):
    return max(action.stage for actions in plan for action in actions)


def befores(plan):
    """The action before each action on its rank."""
    return {action: before for actions in plan for before, action in pairwise(actions)}


def timed(plan, seconds, queue=True, needs=inputs_of, join=max, last=None):
    """When each action ends; with one rule left out, to name slips."""
    last = last_stage(plan) if last is None else last
    before = befores(plan) if queue else {}
    actions = [action for row in plan for action in row]
    waits = {action: needs(action, last) + ([before[action]] if action in before else []) for action in actions}
    followers = {action: [] for action in actions}
    for action, waited in waits.items():
        for each in waited:
            if each not in waits:
                raise StuckError(f"{action} waits for {each}, which is in no list")
            followers[each].append(action)
    left = {action: len(waited) for action, waited in waits.items()}
    ready, end = deque(action for action in actions if not left[action]), {}
    while ready:
        action = ready.popleft()
        begin = [] if action in before else [0.0]  # the rank's clock
        end[action] = join([*begin, *(end[each] for each in waits[action])]) + seconds[action.kind]
        for each in followers[action]:
            left[each] -= 1
            if left[each] == 0:
                ready.append(each)
    if len(end) < len(waits):
        raise StuckError(f"{in_a_circle(waits, end)} waits for itself")
    return end


def in_a_circle(waits, end):
    """An action that waits for itself."""
    passed, action = set(), next(each for each in waits if each not in end)
    while action not in passed:
        passed.add(action)
        action = next(each for each in waits[action] if each not in end)
    return action


def no_gradients(action, last):
    return [each for each in inputs_of(action, last) if each.kind == "F" or action.kind == "F"]


def no_activations(action, last):
    return [each for each in inputs_of(action, last) if action.kind == "B"]


def next_forward(action, last):
    """A backward's gradient, taken for the next stage's forward."""
    return [each._replace(kind="F") for each in inputs_of(action, last)]


def gradient_from_before(action, last):
    stage, kind, micro = action
    if kind == "F":
        return inputs_of(action, last)
    return [Action(stage, "F", micro)] + ([Action(stage - 1, "B", micro)] if stage else [])


def by_hand(*rows):
    return [[Action(int(each[0]), each[1], int(each[2])) for each in row.split()] for row in rows]


def plans(variant):
    p, m = variant.ranks, variant.size
    return {
        "naive, 12 ranks": [right_gpipe(rank, 12, 1) for rank in range(12)],
        "GPipe, 4 ranks, 5 micro-batches": [right_gpipe(rank, 4, 5) for rank in range(4)],
        f"1F1B, {p} ranks, {m} micro-batches": [right_one_f_one_b(rank, p, m) for rank in range(p)],
        "1F1B, 4 ranks, 8 micro-batches": [right_one_f_one_b(rank, 4, 8) for rank in range(4)],
        "1F1B, 4 ranks, 2 micro-batches": [right_one_f_one_b(rank, 4, 2) for rank in range(4)],
        "one rank": [right_gpipe(0, 1, 3)],
        "two stages on each of 2 ranks": by_hand("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"),
        "stages 0 and 2 on rank 0, stage 1 on rank 1": by_hand("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1", "1F0 1F1 1B0 1B1"),
        "two stages on each of 2 ranks, micro-batches in turn": by_hand(
            "0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1", "1F0 3F0 1F1 3F1 3B0 1B0 3B1 1B1"
        ),
        "neighbouring stages on one rank": by_hand(
            "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "2F0 3F0 2F1 3B0 3F1 2B0 3B1 2B1"
        ),
    }


def drawn_plan(draw):
    """A plan without a deadlock: stages on any ranks, and actions in any order in which they could run."""
    ranks, micros = draw.randint(1, 4), draw.randint(1, 4)
    home = [*range(ranks), *(draw.randrange(ranks) for _ in range(draw.randint(0, ranks + 1)))]
    draw.shuffle(home)
    last = len(home) - 1
    left = [Action(stage, kind, micro) for stage in range(len(home)) for kind in "FB" for micro in range(micros)]
    plan, done = [[] for _ in range(ranks)], set()
    while left:
        action = draw.choice([each for each in left if done.issuperset(inputs_of(each, last))])
        left.remove(action)
        done.add(action)
        plan[home[action.stage]].append(action)
    return plan


def drawn_deadlock(draw):
    """A plan that was right until some of its actions changed places."""
    plan = drawn_plan(draw)
    while True:
        actions = draw.choice(plan)
        one, other = (draw.randrange(len(actions)) for _ in range(2))
        actions[one], actions[other] = actions[other], actions[one]
        try:
            timed(plan, {"F": 1.0, "B": 2.0})
        except StuckError:
            return plan


LONG = {
    "GPipe, 2 ranks, 1500 micro-batches": [right_gpipe(rank, 2, 1500) for rank in range(2)],
    "1F1B, 2 ranks, 600 micro-batches": [right_one_f_one_b(rank, 2, 600) for rank in range(2)],
}

DEADLOCKS = {
    "a last rank whose backward comes before its forward": ["0F0 0B0", "1B0 1F0"],
    "a rank that waits for a gradient before it has sent the activations": ["0F0 0B1 0F1 0B0", "1F0 1F1 1B0 1B1"],
    "a rank whose stage 3 comes before its stage 0 in backward, as stage 1 comes after stage 2 in forward": [
        "0F0 3F0 3B0 0B0",
        "2F0 1F0 2B0 1B0",
    ],
    "a stage that comes before the previous one on its rank": ["1F0 0F0 1B0 0B0", "2F0 2B0"],
    "a stage whose backward comes before that of the next one on its rank": ["0F0 1F0 0B0 1B0", "2F0 2B0"],
}
MADE = 20  # deadlocks by chance


def observe_deadlocks(answer, plans):
    """How the answer reports each deadlock, and the likely slip."""
    return [observe_deadlock(answer, plan) for plan in plans]


def observe_deadlock(answer, plan):
    slip = "if a full round over the ranks makes no progress, it is a deadlock: raise RuntimeError"
    try:
        found = answer(plan, {"F": 1.0, "B": 2.0})
    except RecursionError:
        slip = "Python's limit ended the recursion, and would end it in a long plan without a deadlock, too"
        return "RecursionError", slip
    except RuntimeError:
        return "RuntimeError", None
    except Exception as error:
        return f"{type(error).__name__} ({error})", "a deadlock has to raise RuntimeError, whatever comes first"
    if isinstance(found, dict) and len(found) == sum(map(len, plan)):
        slip = (
            "an action waits for itself but has ended: a forward pass needs that of the previous stage, and a backward "
            "pass needs its own stage's forward pass, too, and that of the next stage, even on the same rank"
        )
    return describe(found), slip


@check("14.5")
def check_ends(answer, variant):
    """Every action ends when its rank and its inputs let it, and a deadlock is one error."""
    short, draw = plans(variant), Random(variant.seed)
    made = {}
    for _ in range(40):
        plan = drawn_plan(draw)
        made[f"the plan {' / '.join(map(as_text, plan))}"] = plan
    for forward, backward, cases in (
        (1.0, 2.0, short),
        (3.0, 1.0, short),
        (1 / 24000, 1 / 58000, short),
        (0.3, 0.7, LONG),
        (1.0, 2.5, made),
    ):
        for name, plan in cases.items():
            where = f"{name}, F {forward:g} and B {backward:g}"
            seconds = {"F": forward, "B": backward}
            compare_ends(ended(answer, plan, seconds, where), plan, seconds, where)
    stuck = {name: by_hand(*rows) for name, rows in DEADLOCKS.items()}
    for plan in [drawn_deadlock(draw) for _ in range(MADE)]:
        stuck[f"the plan {' / '.join(map(as_text, plan))}"] = plan
    slip = "if a full round over the ranks makes no progress, it is a deadlock: raise RuntimeError"
    (found,) = on_ranks(1, observe_deadlocks, answer, list(stuck.values()), timeout=6.0, slip=slip)
    for name, (got, usual) in zip(stuck, found, strict=True):
        expect(f"a deadlock, {name}", got, "RuntimeError", slip=usual)


def ended(answer, plan, seconds, where):
    """The learner's ends of a plan without a deadlock."""
    given, durations = [list(actions) for actions in plan], dict(seconds)
    try:
        got = answer(given, durations)
    except RuntimeError as error:
        if "write it yourself" in str(error):
            raise
        raise AnswerError(
            f"{where}: no deadlock, but it raises {error!r}\nlikely slip: {stopped(error, plan)}"
        ) from error
    slip = "the lists are the caller's: count positions, or copy them"
    expect(f"the plan afterwards, {where}", list(map(as_text, given)), list(map(as_text, plan)), slip=slip)
    expect(f"the durations afterwards, {where}", durations, seconds, slip="`seconds` is the caller's: do not change it")
    return got


def stopped(error, plan):
    """Why an answer has taken a plan for a deadlock."""
    if any(isinstance(each, RecursionError) for each in (error, error.__cause__, error.__context__)):
        return (
            f"Python's limit ended the recursion: a list may have thousands of actions, here {max(map(len, plan)):,}, "
            "and each waits for the one before it; keep a position for each rank and loop"
        )
    if max(map(len, plan)) > 100:
        return "a long list needs many rounds over the ranks: it is a deadlock only if a full round makes no progress"
    return "one waiting rank is not yet a deadlock, and stage 0's F and the last stage's B wait for no other stage"


def compare_ends(got, plan, seconds, where):
    wanted = timed(plan, seconds)
    if not isinstance(got, dict):
        raise AnswerError(f"{where}: expected a dict of the actions' ends, got {describe(got)}")
    if strange := [each for each in got if not isinstance(each, Action)]:
        raise AnswerError(f"{where}: expected actions as keys, got {describe(strange[0])}, which is no Action")
    if got.keys() != wanted.keys():
        missing = [each for each in wanted if each not in got]
        extra = [each for each in got if each not in wanted]
        slip = (
            "a rank whose next action has no inputs yet has to be checked again when other ranks have made progress"
            if missing
            else "the dict has the actions of this plan alone: begin with an empty one"
        )
        raise AnswerError(
            f"{where}: expected {len(wanted)} actions, got {len(got)}: {(missing or extra)[0]} is "
            f"{'missing' if missing else 'in no list'}\nlikely slip: {slip}"
        )
    wrong = [each for each in wanted if not same(got[each], float(wanted[each]), 1e-9)]
    if wrong:
        first = min(wrong, key=lambda each: wanted[each])
        slip = next((text for text, rule in RULES.items() if explains(rule, got, plan, seconds)), None)
        usual = slip or begins(first, got, plan, seconds)
        expect(f"the end of {first}, {where}", got[first], float(wanted[first]), slip=usual, tolerance=1e-9)


RULES = {
    "the last stage has the largest number of all, and need not be on the last rank": lambda plan, seconds: timed(
        plan, seconds, last=last_stage(plan[-1:])
    ),
    "the last stage has the largest number of all, which need not be the number of the last rank": (
        lambda plan, seconds: timed(plan, seconds, last=len(plan) - 1)
    ),
    "a rank does one thing at a time: an action also waits for the one before it in the list": partial(
        timed, queue=False
    ),
    "a backward pass waits for the gradient from the next stage": partial(timed, needs=no_gradients),
    "a forward pass waits for the activations of the previous stage": partial(timed, needs=no_activations),
    "a backward pass waits for the next stage's backward pass, not for its forward pass": partial(
        timed, needs=next_forward
    ),
    "gradients come from the next stage, not from the previous one": partial(timed, needs=gradient_from_before),
    "an action waits for the latest of its inputs; their times do not add up": partial(timed, join=sum),
    "an action begins with the latest of its inputs, not the earliest": partial(timed, join=min),
    "these are the times at which actions begin": lambda plan, seconds: {
        each: end - seconds[each.kind] for each, end in timed(plan, seconds).items()
    },
    "durations need not be whole numbers, and here they are rounded down": lambda plan, seconds: timed(
        plan, {kind: int(each) for kind, each in seconds.items()}
    ),
    "durations need not be whole numbers, and here they are rounded": lambda plan, seconds: timed(
        plan, {kind: round(each) for kind, each in seconds.items()}
    ),
    "F and B take different times": lambda plan, seconds: timed(plan, dict.fromkeys("FB", seconds["F"])),
    "a backward pass takes seconds['B'], which need not be twice seconds['F']": lambda plan, seconds: timed(
        plan, {"F": seconds["F"], "B": 2 * seconds["F"]}
    ),
    "the times of F and B are swapped": lambda plan, seconds: timed(plan, {"F": seconds["B"], "B": seconds["F"]}),
    "a rank has one clock for all of its stages": lambda plan, seconds: timed(by_stage(plan), seconds),
}


def explains(rule, got, plan, seconds):
    """True if all ends are those of a simulator with this mistake."""
    try:
        ends = rule(plan, seconds)
    except StuckError:
        return False
    return all(same(got[each], float(end), 1e-9) for each, end in ends.items())


def begins(action, got, plan, seconds):
    """Explain a wrong end of an action from the answer's own ends of the actions before it."""
    before = befores(plan)
    waits = inputs_of(action, last_stage(plan)) + ([before[action]] if action in before else [])
    if not all(type(got[each]) in (int, float) for each in (action, *waits)):
        return None
    begin, ready = got[action] - seconds[action.kind], max([0.0, *(got[each] for each in waits)])
    digits = next((digits for digits in range(13) if all(got[each] == round(got[each], digits) for each in got)), None)
    if digits is not None and round(ready + seconds[action.kind], digits) == got[action]:
        return f"the ends are rounded: {got[action]:g} instead of {ready + seconds[action.kind]:.10g}"
    late = next((f"{each} ends at {got[each]:g}" for each in waits if got[each] > begin + 1e-9), None)
    return f"{action} begins at {begin:.10g}; " + (late or f"its rank and its inputs are ready at {ready:.10g}")


def by_stage(plan):
    """The plan as if each stage had a rank of its own."""
    found = {}
    for action in (each for actions in plan for each in actions):
        found.setdefault(action.stage, []).append(action)
    return list(found.values())


# 14.6

OUT, IN = 3, 7


def inputs(variant, seed=0):
    """x, weight, bias, and the gradient of the output."""
    shapes = ((2, variant.size, IN), (OUT, IN), (OUT,), (2, variant.size, OUT))
    return [randn(*shape, seed=100 * variant.seed + 10 * seed + n) for n, shape in enumerate(shapes)]


class Sums(TorchDispatchMode):
    """Counts sums, which are no products of matrices: one of them is the gradient of a bias."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.sum
        return func(*args, **kwargs or {})


class Matmuls(TorchDispatchMode):
    """Knows what has been multiplied by the size of the result, to name it."""

    KINDS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)

    def __init__(self, rows):
        super().__init__()
        self.names = {rows * OUT: "the output", rows * IN: "the gradient of x", OUT * IN: "the gradient of the weight"}
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if func.overloadpacket in self.KINDS:
            self.made.append(self.names.get(result.numel(), "another matmul"))
        return result

    def slip(self, wanted):
        """What is computed although it is not `wanted`, or more than once."""
        if extra := [name for name in self.made if name != wanted]:
            second = {
                "the output": "no second forward pass: x and the gradient of y are enough",
                "the gradient of x": "the gradient of x belongs to the backward pass",
                "the gradient of the weight": "the matmul of the gradient and x runs in the backward pass: only the "
                "addition is left for later",
            }
            return second.get(extra[0], "one matmul is needed here")
        return f"each matmul is computed once, and {wanted} is computed {len(self.made)} times" if self.made else None


def calls_of(later, backwards):
    """The functions that the backward passes have postponed: one each."""
    if strange := [each for each in later if not callable(each)]:
        raise AnswerError(f"later: expected functions without arguments, got {describe(strange[0])}")
    slip = "one function for both gradients: W is one action"
    if len(later) < backwards:
        slip = "each backward appends one, whether x needs a gradient or not, and leaves those of others where they are"
    expect(f"functions in `later`, number of backward passes: {backwards}", len(later), backwards, slip=slip)
    calls = list(later)
    later.clear()
    return calls


@check("14.6")
def check_linear_later(answer, variant):
    """The gradient of x at once, those of weight and bias when they are asked for; nothing is computed twice."""
    x, weight, bias, gradient = inputs(variant)
    product = 2 * gradient.numel() * IN  # floating-point operations of one of the two products
    later = []
    linear = answer(later)
    if not callable(linear):
        raise AnswerError(f"expected a function of x, weight and bias, got {describe(linear)}")
    leaf, w, b = (nn.Parameter(each.clone()) for each in (x, weight, bias))
    with FlopCounterMode(display=False) as counter, Matmuls(2 * variant.size) as matmuls:
        y = linear(leaf * 1, w, b)
    slips = {"the bias is missing": F.linear(x, weight)}
    EXACT("the output", y.detach() if isinstance(y, Tensor) else y, F.linear(x, weight, bias), slips=slips)
    slip = "the forward pass has put something into `later`: the gradient of y is not there yet"
    expect("functions in `later` after forward", len(later), 0, slip=slip)
    if not y.requires_grad:
        raise AnswerError("the output has no gradient\nlikely slip: return `apply` of an autograd function")
    expect("floating-point operations of forward", counter.get_total_flops(), product, slip=matmuls.slip("the output"))
    given = gradient.clone()
    with FlopCounterMode(display=False) as counter, Sums() as sums, Matmuls(2 * variant.size) as matmuls:
        y.backward(given)
    check_backward(leaf.grad, gradient @ weight, (w, b), later)
    slip = matmuls.slip("the gradient of x")
    expect("floating-point operations of backward", counter.get_total_flops(), product, slip=slip)
    slip = "the gradient of the bias is computed in the backward pass: only the addition is left for later"
    expect("sums in backward", sums.count, 0, slip=slip)
    check_later(calls_of(later, 1), (w, b), gradients_of(x, gradient), product)
    expect("the gradient of y afterwards", given, gradient, slip="it is the caller's: do not change it")
    expect("x afterwards", leaf.detach(), x, slip="x is the caller's: do not change it")
    for name, parameter, before in (("weight", w, weight), ("bias", b, bias)):
        slip = "only the optimizer changes parameters"
        expect(f"the {name} afterwards", parameter.detach(), before, slip=slip)
    check_three(answer, variant)
    check_layers(answer, variant)
    check_two_lists(answer, variant)
    check_shapes(answer, weight, bias)
    check_one_row(answer, weight, bias)


def check_backward(got, wanted, parameters, later):
    """The gradients that the backward pass has computed, and the functions that it has postponed."""
    if None in later:
        raise AnswerError("`later` has None\nlikely slip: append the function, not what it returns")
    w, b = parameters
    left = "nothing was postponed: the gradients of the weights are computed in the backward pass"
    expect("weight.grad after backward", None if w.grad is None else "a gradient", None, slip=left)
    slip = "the weight's gradient is postponed, the bias's is not: backward returns None for both"
    expect("bias.grad after backward", None if b.grad is None else "a gradient", None, slip=slip)
    slip = "the gradient of x is postponed, too, but the previous stage waits for it"
    slips = {slip: torch.zeros_like(wanted), "backward returns it first: the previous stage waits for it": None}
    EXACT("x's gradient after backward", got, wanted, slips=slips)


def gradients_of(x, gradient):
    """The gradients of weight and bias."""
    rows = gradient.flatten(0, -2)
    return rows.T @ x.flatten(0, -2), rows.sum(0)


def check_later(calls, parameters, wanted, product):
    """The gradients that the postponed function computes, called once."""
    w, b = parameters
    with FlopCounterMode(display=False) as counter, Matmuls(product // (2 * OUT * IN)) as matmuls:
        try:
            for call in calls:
                call()
        except RuntimeError as error:
            if "size" not in str(error):
                raise
            slip = "one of x and the gradient of y has to be transposed, so that the result has the weight's shape"
            if f"'[{OUT}]'" in str(error):
                slip = "the gradient of the bias is the sum over all dimensions of the gradient of y except the last"
            raise AnswerError(f"a function of `later`: {error}\nlikely slip: {slip}") from error
    rows = product // (2 * OUT * IN)
    slips = {
        "this is the mean over the rows": wanted[0] / rows,
        "it is added twice": 2 * wanted[0],
        "the function computes the weight's gradient, too": None,
    }
    EXACT("weight.grad when all of `later` has been called", w.grad, wanted[0], slips=slips)
    slips = {
        "the bias is added to every row: its gradient is their sum, not their mean": wanted[1] / rows,
        "it is added twice": 2 * wanted[1],
        "the function computes the bias's gradient, too": None,
    }
    EXACT("bias.grad when all of `later` has been called", b.grad, wanted[1], slips=slips)
    slip = "autograd recorded the matmul, which keeps x's graph alive: `x.detach()`, or torch.no_grad()"
    expect("weight.grad has a graph", w.grad.requires_grad, False, slip=slip)
    slip = matmuls.slip("the gradient of the weight") or "one matmul is left for later, and none has been computed"
    expect("floating-point operations of `later`", counter.get_total_flops(), product, slip=slip)


def check_three(answer, variant):
    """Three micro-batches go forward, then backward in another order, one without a gradient of x; so do their W."""
    later, rows = [], 2 * variant.size
    linear = answer(later)
    batches = [inputs(variant, seed) for seed in (1, 2, 3)]
    parameters = [nn.Parameter(each.clone()) for each in batches[0][1:3]]
    outputs = [linear(batch[0].clone().requires_grad_(n != 1), *parameters) for n, batch in enumerate(batches)]
    for n in (1, 0, 2):
        gradient = batches[n][3]
        with FlopCounterMode(display=False) as counter:
            outputs[n].backward(gradient.transpose(0, 1).contiguous().transpose(0, 1))
        if n == 1:
            slip = "the first stage's x needs no gradient: `ctx.needs_input_grad` says so"
            expect("floating-point operations of a backward without x", counter.get_total_flops(), 0, slip=slip)
    found = dict(zip((1, 0, 2), calls_of(later, 3), strict=True))
    totals = [0.0, 0.0]
    for count, n in enumerate((0, 2, 1), 1):
        with FlopCounterMode(display=False) as counter, Matmuls(rows) as matmuls:
            found[n]()
        x, gradient = batches[n][0], batches[n][3]
        alone = gradients_of(x, gradient)
        mixes = [gradients_of(other[0], gradient) for other in batches if other[0] is not x]
        others = [gradients_of(batch[0], batch[3]) for m, batch in enumerate(batches) if m != n]
        for k, (name, parameter) in enumerate(zip(("weight", "bias"), parameters, strict=True)):
            before, wanted = totals[k], totals[k] + alone[k]
            slips = {
                f"`.grad` of the {name} was replaced: gradients of micro-batches add up": alone[k],
                "a function does the work of its own backward pass, not all the work in `later`": sum(
                    (other[k] for other in others), alone[k]
                ),
                f"it has not added to `.grad` of the {name}: each function does the work of its own backward pass": (
                    before if count > 1 else None
                ),
            }
            explained = {
                "this is the newest micro-batch's that was left: a function does the work of its own backward pass": (
                    others[-1:] if count == 1 else []
                ),
                "this is another micro-batch's: a function does the work of its own backward pass": others,
                "x is that of another forward pass: each backward pass needs its own, from `ctx`": mixes,
            }
            for text, values in explained.items():
                for value in values:
                    if same(parameter.grad, before + value[k], 1e-12):
                        slips.setdefault(text, before + value[k])
            slip = "each backward pass postpones the work of its own micro-batch: keep x and the gradient of each"
            what = f"{name}.grad when {count} of 3 functions have been called, that of micro-batch {n} last"
            EXACT(what, parameter.grad, wanted, slips=slips, slip=slip)
            totals[k] = wanted
        slip = matmuls.slip("the gradient of the weight")
        expect("floating-point operations of a function", counter.get_total_flops(), 2 * rows * OUT * IN, slip=slip)


def check_layers(answer, variant):
    """One function serves two layers, in two steps between which `.grad` is reset; float32."""
    later = []
    linear = answer(later)
    x, weight, bias, _ = (each.float() for each in inputs(variant, 4))
    first = nn.Parameter(weight), nn.Parameter(bias)
    second = nn.Parameter(weight.flip(0)), nn.Parameter(2 * bias)
    names = ("weight", "bias", "the second layer's weight", "the second layer's bias")
    for step in ("the first step", "a second step after `.grad` was set to None"):
        (linear(x, *first) * linear(x, *second)).sum().backward()
        for call in list(later):
            call()
        expect("functions in `later` when both have been called", len(later), 2, slip="`later` is the caller's")
        later.clear()
        loss = (F.linear(x, *first) * F.linear(x, *second)).sum()
        for name, parameter, wanted in zip(
            names, (*first, *second), torch.autograd.grad(loss, (*first, *second)), strict=True
        ):
            slip = "a function is for the parameters of its own call, however many layers and steps there are"
            expect(f"{name}.grad of two layers, {step}", parameter.grad, wanted, slip=slip, tolerance=1e-4)
            parameter.grad = None


def check_two_lists(answer, variant):
    """Two functions with a list each, used in turn."""
    x, weight, bias, gradient = inputs(variant, 5)
    lists = [], []
    linears = [answer(later) for later in lists]
    parameters = [(nn.Parameter(scale * weight), nn.Parameter(scale * bias)) for scale in (1, 2)]
    outputs = [linear(x, *pair) for linear, pair in zip(linears, parameters, strict=True)]
    for output in outputs:
        output.backward(gradient)
    slip = "a second `linear_later` has changed the first: each keeps its own `later`"
    expect("functions in the lists of two `linear_later`", [len(each) for each in lists], [1, 1], slip=slip)
    for later, pair in zip(lists, parameters, strict=True):
        for call in later:
            call()
        for name, parameter, wanted in zip(("weight", "bias"), pair, gradients_of(x, gradient), strict=True):
            EXACT(f"{name}.grad with two `linear_later`", parameter.grad, wanted, slip=slip)


def check_one_row(answer, weight, bias):
    """One row of x, twice with one gradient; in bfloat16, where sums of two are exact."""
    for dtype in (torch.float64, torch.bfloat16):
        x, gradient = randn(1, IN, seed=9).to(dtype), randn(1, OUT, seed=10).to(dtype)
        later, given = [], gradient.clone()
        linear, w, b = answer(later), nn.Parameter(weight.to(dtype)), nn.Parameter(bias.to(dtype))
        for _ in range(2):
            linear(x, w, b).backward(given)
        where = f"of one row, twice, in {str(dtype).removeprefix('torch.')}"
        slip = "bias.grad is a view of the gradient of y, which later additions would change: it needs its own memory"
        for call in later:
            call()
            aliased = b.grad is not None and b.grad.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
            expect(f"bias.grad {where} shares memory with the gradient of y", aliased, False, slip=slip)
        expect(f"the gradient of y {where}", given, gradient, slip=slip)
        for name, parameter, wanted in zip(("weight", "bias"), (w, b), gradients_of(x, gradient), strict=True):
            EXACT(f"{name}.grad {where}", parameter.grad, 2 * wanted)


def check_shapes(answer, weight, bias):
    """x with two dimensions, and with four, which are not contiguous."""
    for shape in ((6,), (2, 3, 4)):
        x = randn(*shape, IN, seed=7).transpose(0, -2).contiguous().transpose(0, -2)
        gradient = randn(*shape, OUT, seed=8)
        where = f"x of shape {list(x.shape)}, " + ("contiguous" if x.is_contiguous() else "not contiguous")
        slip = "x has two dimensions or more, in any layout: flatten all but the last, by `flatten(0, -2)`"
        w, b, later = nn.Parameter(weight.clone()), nn.Parameter(bias.clone()), []
        try:
            answer(later)(x, w, b).backward(gradient)
            for call in later:
                call()
        except (RuntimeError, IndexError, ValueError) as error:
            raise AnswerError(f"{where}: {error}\nlikely slip: {slip}") from error
        for name, parameter, wanted in zip(("weight", "bias"), (w, b), gradients_of(x, gradient), strict=True):
            EXACT(f"{name}.grad, {where}", parameter.grad, wanted, slip=slip)


# 14.7

LISTS = {
    "GPipe": "0F0 0F1 0F2 0B0 0B1 0B2",
    "GPipe, backwards from the last": "1F0 1F1 1F2 1B2 1B1 1B0",
    "1F1B": "2F0 2F1 2B0 2F2 2B1 2B2",
    "two stages": "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
    "two stages, mixed": "3F0 1F0 3B0 1B0 3F1 1F1 1B1 3B1",
    "two stages, one of them backwards from the last": "0F0 0F1 2F0 2F1 2B1 2B0 0B0 0B1",
    "zero bubble": "0F0 0F1 0I0 0I1 0W0 0W1",
    "zero bubble, two stages": "1F0 1F1 3F0 3I0 3F1 1I0 3W0 3I1 1W0 1I1 3W1 1W1",
    "a full backward pass and a split one": "0F0 0F1 0I0 0W0 0B1",
    "one micro-batch": "1F0 1B0",
}


def drawn_lists(seed):
    """Lists of one to three stages, with full and split backward passes in any order."""
    draw = Random(seed)
    for _ in range(40):
        stages, micros = draw.sample(range(6), draw.randint(1, 3)), range(draw.randint(1, 4))
        chains = [
            [Action(stage, kind, micro) for kind in draw.choice(("FB", "FIW"))] for stage in stages for micro in micros
        ]
        actions = []
        while chains := [chain for chain in chains if chain]:
            actions.append(draw.choice(chains).pop(0))
        yield actions


@check("14.7")
def check_when_to_reduce(answer, variant):
    """ZeRO-1 once for each stage, as soon as its gradients are complete; ZeRO-2 after each micro-batch."""
    cases = {f"{name}: {text}": by_hand(text)[0] for name, text in LISTS.items()}
    compare_positions(answer, cases)
    compare_positions(answer, {as_text(actions): actions for actions in drawn_lists(variant.seed)})


def compare_positions(answer, cases):
    for zero in (1, 2):
        found = [positions(answer, actions, zero, where) for where, actions in cases.items()]
        known = [reducing(actions, zero) for actions in cases.values()]
        slips = made_everywhere(found, [each for _, each in known])
        for (where, actions), got, (wanted, _), named in zip(cases.items(), found, known, slips, strict=True):
            usual = misplaced(got, wanted, actions)
            expect(f"positions, ZeRO-{zero}, {where}", got, wanted, slips=named, slip=usual)


def positions(answer, actions, zero, where):
    """The learner's positions in a list."""
    given = list(actions)
    got = answer(given, zero)
    slip = "the list is the caller's: do not change it"
    expect(f"the list afterwards, ZeRO-{zero}, {where}", as_text(given), as_text(actions), slip=slip)
    if not isinstance(got, list | tuple) or not all(type(at) is int for at in got):
        raise AnswerError(f"ZeRO-{zero}, {where}: expected a list of positions, got {describe(got)}")
    return list(got)


def misplaced(got, wanted, actions):
    """The first position that is missing, or one too many."""
    if missing := [at for at in wanted if at not in got]:
        return f"{missing[0]} is missing: gradients are complete after {actions[missing[0]]}"
    if extra := [at for at in got if at not in wanted]:
        return f"{extra[0]} is one too many: after {actions[extra[0]]} more is added, or nothing is new"
    return "positions are in the order of the list, each once"


def reducing(actions, zero):
    """The right positions, and those that mistakes give, by their explanation."""

    def of(kinds):
        return [at for at, each in enumerate(actions) if each.kind in kinds]

    def once(at_each, field="stage"):
        return sorted({getattr(actions[at], field): at for at in at_each}.values())

    def both(kinds):
        return once(of(kinds)) if zero == 1 else of(kinds)

    done, wanted, newest = of("BW"), both("BW"), max(each.micro for each in actions)
    firsts = {actions[at].stage: at for at in reversed(done)}
    return wanted, {
        "ZeRO-1 keeps unsharded gradients for the step: one message for each stage, not one for each micro-batch": done,
        "ZeRO-2 keeps no unsharded gradients from one micro-batch to the next": once(done),
        "each stage has gradients of its own: those of one micro-batch are complete once for each stage": once(
            done, "micro"
        ),
        "the last in the list counts, which need not be the micro-batch with the largest number": [
            at for at in done if actions[at].micro == newest
        ],
        "each stage has a last micro-batch, which need not be the last one of the list": [
            at for at in done if actions[at].micro == actions[done[-1]].micro
        ],
        "one position for all stages: a stage whose gradients are complete need not wait for the others": [
            len(actions) - 1
        ],
        "I computes the gradient of the input; those of the weights come with W": both("BI"),
        "a split backward pass adds to gradients, too: it has no B": both("B"),
        "a full backward pass adds to gradients, too: it has no W": both("W"),
        "full and split backward passes add to the same gradients: one message for each stage": sorted(
            {(actions[at].stage, actions[at].kind): at for at in done}.values()
        ),
        "a forward pass computes no gradients: they are complete after B or W": both("F"),
        "the gradients are complete after the last backward, not after the first": sorted(firsts.values()),
        "these are counted from 1": [at + 1 for at in wanted],
        "these are the positions before": [at - 1 for at in wanted],
        "count all actions of the list, not only backward passes": [done.index(at) for at in wanted],
        "after I and after W: a micro-batch's gradients are complete once": of("BIW"),
        "after every action: a forward pass computes no gradients, and I only that of the input": list(
            range(len(actions))
        ),
        "these are the actions' micro-batches, not their positions": [actions[at].micro for at in wanted],
    }
