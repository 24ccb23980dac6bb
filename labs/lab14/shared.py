"""What several exercises of lab 14 share."""

from collections import deque
from functools import partial
from itertools import pairwise
from numbers import Integral

import torch

from minifsdp.course.workshop.checking import AnswerError, describe, expect
from minifsdp.pipeline.actions import Action, check_complete

EXACT = partial(expect, tolerance=1e-12)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def as_text(actions):
    return " ".join(map(str, actions))


def made_everywhere(found, slips):
    """The slips of each case, without those that explain one case and not another."""
    pairs = list(zip(found, slips, strict=True))
    made = {text for text in slips[0] if all(got == each[text] for got, each in pairs)}
    return [{text: each[text] for text in made} for each in slips]


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


def by_hand(*rows):
    return [[Action(int(each[0]), each[1], int(each[2])) for each in row.split()] for row in rows]
