"""Exercise 14.5: The bubble, computed."""

from collections.abc import Mapping
from functools import partial
from random import Random

from minifsdp.course.workshop.checking import AnswerError, check, describe, expect, on_ranks, same
from minifsdp.course.workshop.references import reference
from minifsdp.pipeline import simulate
from minifsdp.pipeline.actions import Action, Plan

from .shared import StuckError, as_text, befores, by_hand, inputs_of, last_stage, right_gpipe, right_one_f_one_b, timed


@reference(
    "14.5",
    hints=(
        "An action begins when the previous one on its rank has ended and its inputs are available. F needs one "
        "other action; B needs two, except in the last stage. In which order do you get to know the ends?",
        "Keep a clock and a position for each rank. Go around the ranks: while the next action of a rank has all its "
        "inputs in `end`, its end is max(clock, inputs) + seconds[kind]; move the clock and the position. If a full "
        "round makes no progress and actions are left, raise.",
    ),
    forbids=(simulate.simulate, simulate._Inputs.of),
)
def ends(plan: Plan, seconds: Mapping[str, float]) -> dict[Action, float]:
    """Return the time at which each action of a plan ends. The first action begins at 0. Messages take no time.

    Args:
        plan: the list of each rank, with forward passes "F" and full backward passes "B". A rank may have several
            stages, and the last stage may be on any rank. Stages count from 0. The plan is complete: every stage has F
            and B of the same micro-batches. A list may have thousands of actions, more than Python's recursion limit.
            Do not change the lists.
        seconds: the duration of "F" and of "B".

    Raises:
        RuntimeError: the plan is a deadlock. (A RecursionError does not count: a long plan may raise it, too.)
    """
    last = max(action.stage for actions in plan for action in actions)
    end: dict[Action, float] = {}
    clocks, positions = [0.0] * len(plan), [0] * len(plan)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan):
            while positions[rank] < len(actions):
                stage, kind, micro = action = actions[positions[rank]]
                needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage > 0 else []
                if kind == "B":
                    needed = [Action(stage, "F", micro)]
                    needed += [Action(stage + 1, "B", micro)] if stage < last else []
                if any(each not in end for each in needed):
                    break
                clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
                end[action] = clocks[rank]
                positions[rank] += 1
                moved = True
    if len(end) < sum(map(len, plan)):
        raise RuntimeError("the plan is a deadlock")
    return end


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
