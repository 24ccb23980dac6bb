"""Wrong answers to exercise 14.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("14.5", "a rank does one thing at a time").diff("""
Lets a rank do everything at once.
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
+ clocks[rank] = max([0.0, *(end[each] for each in needed)]) + seconds[kind]
""")
wrong("14.5", "a backward pass waits for the gradient from the next stage").diff("""
Forgets the gradient.
- needed += [Action(stage + 1, "B", micro)] if stage < last else []
""")
wrong("14.5", "a forward pass waits for the activations of the previous stage").diff("""
Forgets the activations.
- needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage > 0 else []
+ needed = []
""")
wrong("14.5", "these are the times at which actions begin").diff("""
Writes down when an action begins.
- end[action] = clocks[rank]
+ end[action] = clocks[rank] - seconds[kind]
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
+ clocks[rank] = max([clocks[rank], *(end[each] + seconds[each.kind] for each in needed)]) + seconds[kind]
""")
wrong("14.5", "F and B take different times").diff("""
Lets everything take as long as a forward.
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
+ clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds["F"]
""")
wrong("14.5", "has to be checked again").diff("""
Goes around the ranks once.
-                 positions[rank] += 1
-                 moved = True
+                 positions[rank] += 1
- if len(end) < sum(map(len, plan)):
-     raise RuntimeError("the plan is a deadlock")
""")
wrong("14.5", "it is a deadlock: raise RuntimeError").diff("""
Goes around the ranks until everything is done.
- while moved:
+ while len(end) < sum(map(len, plan)):
""")
wrong("14.5", "if a full round over the ranks makes no progress").diff("""
Returns what has run before the deadlock.
- if len(end) < sum(map(len, plan)):
-     raise RuntimeError("the plan is a deadlock")
""")
wrong("14.5", "their times do not add up").diff("""
Adds up what an action waits for.
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
+ clocks[rank] = sum([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
""")
wrong("14.5", "which need not be the number of the last rank").diff("""
Takes the last rank's stage for the last one.
- last = max(action.stage for actions in plan for action in actions)
+ last = len(plan) - 1
""")
wrong("14.5", "and need not be on the last rank").diff("""
Looks for the last stage on the last rank.
- last = max(action.stage for actions in plan for action in actions)
+ last = max(action.stage for action in plan[-1])
""")
wrong("14.5", "a backward pass needs its own stage's forward pass, too").diff("""
Forgets that a backward needs its own forward.
- needed = [Action(stage, "F", micro)]
+ needed = []
""")
wrong("14.5", "the last stage's B wait for no other stage").diff("""
Lets the last stage wait for a stage after it.
- needed += [Action(stage + 1, "B", micro)] if stage < last else []
+ needed += [Action(stage + 1, "B", micro)]
""")
wrong("14.5", "not for its forward").diff("""
Waits for the next stage's forward.
- needed += [Action(stage + 1, "B", micro)] if stage < last else []
+ needed += [Action(stage + 1, "F", micro)] if stage < last else []
""")
wrong("14.5", "not from the previous one").diff("""
Takes gradients from the stage before.
- needed += [Action(stage + 1, "B", micro)] if stage < last else []
+ needed += [Action(stage - 1, "B", micro)] if stage > 0 else []
""")
wrong("14.5", "a deadlock has to raise RuntimeError").diff("""
Raises another error.
- raise RuntimeError("the plan is a deadlock")
+ raise ValueError("the plan is a deadlock")
""")
wrong("14.5", "need not be twice seconds['F']").diff("""
Takes a backward for two forwards.
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
+ clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds["F"] * (1 if kind == "F" else 2)
""")
wrong("14.5", "not the earliest").diff("""
Begins with the first input.
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
+ clocks[rank] = min([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
""")
wrong("14.5", "3B0 begins at 4; 3F4 ends at 8").diff("""
Forgets the rank's clock where there are inputs.
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
+ clocks[rank] = (max(end[each] for each in needed) if needed else clocks[rank]) + seconds[kind]
""")
wrong("14.5", "a rank has one clock for all of its stages").diff("""
Keeps a clock for each stage.
- clocks, positions = [0.0] * len(plan), [0] * len(plan)
+ clocks, positions = [0.0] * (last + 1), [0] * len(plan)
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
- end[action] = clocks[rank]
+ clocks[stage] = max([clocks[stage], *(end[each] for each in needed)]) + seconds[kind]
+ end[action] = clocks[stage]
""")


@wrong("14.5", "count positions, or copy them")
def ends(plan, seconds):
    """Takes the actions out of the caller's lists."""
    last = max(action.stage for actions in plan for action in actions)
    end, clocks, moved = {}, [0.0] * len(plan), True
    while moved:
        moved = False
        for rank, actions in enumerate(plan):
            while actions:
                stage, kind, micro = actions[0]
                needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage > 0 else []
                if kind == "B":
                    needed = [Action(stage, "F", micro)]
                    needed += [Action(stage + 1, "B", micro)] if stage < last else []
                if any(each not in end for each in needed):
                    break
                clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
                end[actions.pop(0)] = clocks[rank]
                moved = True
    if any(plan):
        raise RuntimeError("the plan is a deadlock")
    return end


@wrong("14.5", "Python's limit ended the recursion")
def ends(plan, seconds):
    """Asks for what an action waits for, without end in a deadlock."""
    last = max(action.stage for actions in plan for action in actions)
    before = {actions[at]: actions[at - 1] for actions in plan for at in range(1, len(actions))}

    @cache
    def end(action):
        stage, kind, micro = action
        needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage > 0 else []
        if kind == "B":
            needed = [Action(stage, "F", micro)]
            needed += [Action(stage + 1, "B", micro)] if stage < last else []
        needed += [before[action]] if action in before else []
        return max([0.0, *map(end, needed)]) + seconds[kind]

    return {action: end(action) for actions in plan for action in actions}


@wrong("14.5", "1F1 begins at 5; its rank and its inputs are ready at 4")
def ends(plan, seconds):
    """Lets the ranks go in step, each time as long as the longest action takes."""
    last = max(action.stage for actions in plan for action in actions)
    end, positions, now = {}, [0] * len(plan), 0.0
    while len(end) < sum(map(len, plan)):
        ready = []
        for rank, actions in enumerate(plan):
            if positions[rank] < len(actions):
                stage, kind, micro = actions[positions[rank]]
                needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage > 0 else []
                if kind == "B":
                    needed = [Action(stage, "F", micro)]
                    needed += [Action(stage + 1, "B", micro)] if stage < last else []
                if all(each in end for each in needed):
                    ready.append(rank)
        if not ready:
            raise RuntimeError("the plan is a deadlock")
        now += max(seconds[plan[rank][positions[rank]].kind] for rank in ready)
        for rank in ready:
            end[plan[rank][positions[rank]]] = now
            positions[rank] += 1
    return end


wrong("14.5", "durations need not be whole numbers, and here they are rounded down").diff("""
Takes whole seconds.
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
+ clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + int(seconds[kind])
""")
wrong("14.5", "the ends are rounded").diff("""
Rounds the ends.
- end[action] = clocks[rank]
+ end[action] = round(clocks[rank], 6)
""")
wrong("14.5", "a long list needs many rounds").diff("""
Goes around the ranks fifty times.
- while moved:
+ for _ in range(50):
""")
wrong("14.5", "`seconds` is the caller's").diff("""
Changes the durations.
- last = max(action.stage for actions in plan for action in actions)
+ last = max(action.stage for actions in plan for action in actions)
+ seconds["I"] = seconds["F"]
""")


@wrong("14.5", "a list may have thousands of actions")
def ends(plan, seconds):
    """Asks for what an action waits for, as deep as the list is long."""
    last = max(action.stage for actions in plan for action in actions)
    before = {actions[at]: actions[at - 1] for actions in plan for at in range(1, len(actions))}
    asked = set()

    @cache
    def end(action):
        if action in asked:
            raise RuntimeError(f"{action} waits for itself")
        asked.add(action)
        stage, kind, micro = action
        needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage else []
        needed += [Action(stage, "F", micro)] if kind == "B" else []
        needed += [Action(stage + 1, "B", micro)] if kind == "B" and stage < last else []
        needed += [before[action]] if action in before else []
        return max(map(end, needed), default=0) + seconds[kind]

    return {action: end(action) for actions in plan for action in actions}


wrong("14.5", "2F0 begins at 1; 1F0 ends at 2").diff("""
Lets a rank's first stage alone wait for activations.
- needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage > 0 else []
+ needed = [Action(stage - 1, "F", micro)] if kind == "F" and 0 < stage < len(plan) else []
""")
wrong("14.5", "1B0 begins at 9; 2B0 ends at 11").diff("""
Lets a rank's last stage alone wait for gradients.
- needed += [Action(stage + 1, "B", micro)] if stage < last else []
+ needed += [Action(stage + 1, "B", micro)] if last - len(plan) < stage < last else []
""")
wrong("14.5", "2F1 begins at 4; 1F1 ends at 5").diff("""
Lets a rank's later stages wait for the micro-batch before.
- needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage > 0 else []
+ needed = [Action(stage - 1, "F", micro)] if kind == "F" and stage > 0 else []
+ needed = [Action(stage, "F", micro - 1)] if needed and stage % len(plan) == 0 and micro else needed
""")
wrong("14.5", "even on the same rank").diff("""
Lets no stage wait for another on its rank.
- if any(each not in end for each in needed):
+ mine = {action.stage for action in actions} - {stage}
+ needed = [each for each in needed if each.stage not in mine]
+ if any(each not in end for each in needed):
""")
wrong("14.5", "which is no Action").diff("""
Takes tuples for keys.
- end[action] = clocks[rank]
+ end[tuple(action)] = clocks[rank]
""")
wrong("14.5", "begin with an empty one").diff("""
Keeps the ends of earlier plans.
- def ends(plan, seconds):
+ def ends(plan, seconds, end={}):
- end = {}
""")
wrong("14.5", "instead of 4.166666667e-05").diff("""
Rounds the ends to nanoseconds.
- end[action] = clocks[rank]
+ end[action] = round(clocks[rank], 9)
""")
wrong("14.5", "1F0 begins at 1.0000001").diff("""
Lets messages take time.
- clocks[rank] = max([clocks[rank], *(end[each] for each in needed)]) + seconds[kind]
+ clocks[rank] = max([clocks[rank], *(end[each] + 1e-7 * (each.stage != stage) for each in needed)]) + seconds[kind]
""")
