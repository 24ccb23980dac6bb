"""Exercise 14.7: When to reduce."""

from collections.abc import Sequence
from random import Random
from typing import Literal

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect
from minifsdp.course.workshop.references import reference
from minifsdp.pipeline.actions import Action

from .shared import as_text, by_hand, made_everywhere


@reference(
    "14.7",
    hints=(
        "A stage's gradients are complete after the last action that adds to them. After which kinds of actions are a "
        "micro-batch's gradients complete: F, B, I or W?",
        '`done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]`. ZeRO-2 reduces after each '
        "of them, ZeRO-1 after the last one of each stage.",
    ),
)
def when_to_reduce(actions: Sequence[Action], zero: Literal[1, 2]) -> list[int]:
    """Return the positions in a rank's list after which gradients of a stage are reduced, in ascending order.

    Args:
        actions: of one or several stages. Each micro-batch of a stage has F, and either B or I and W; a list may
            contain both kinds of backward pass.
        zero: with 1, reduce each stage's gradients once, as soon as they are complete for the step. With 2, reduce the
            gradients of each micro-batch as soon as they are complete.
    """
    done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
    if zero == 2:
        return done
    return sorted({actions[at].stage: at for at in done}.values())


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
