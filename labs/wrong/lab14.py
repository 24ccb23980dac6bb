"""Wrong answers to lab 14, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 14.1


@wrong("14.1", "every rank has the same number of layers, whatever they cost")
def place(costs, ranks):
    """Places by number."""
    return [len(part) for part in torch.arange(len(costs)).tensor_split(ranks)]


@wrong("14.1", "a stage closed as soon as it has reached the average")
def place(costs, ranks):
    """Fills each stage up to the average."""
    counts, filled = [0], 0
    for cost in costs:
        if filled >= sum(costs) / ranks and len(counts) < ranks:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += cost
    return counts


@wrong("14.1", "a layer across a share of the total may belong on either side")
def place(costs, ranks):
    """Cuts at multiples of the average."""
    counts, passed = [0] * ranks, 0
    for cost in costs:
        counts[min(ranks - 1, int(passed / (sum(costs) / ranks)))] += 1
        passed += cost
    return counts


wrong("14.1", "these are the ranks' first layers").diff("""
Returns where the stages begin.
- return best(len(costs), ranks)[1]
+ counts = best(len(costs), ranks)[1]
+ return [sum(counts[:rank]) for rank in range(ranks)]
""")
wrong("14.1", "a stage without a layer").diff("""
Lets a stage be empty.
- for begin in range(stages - 1, end):
+ for begin in range(end, -1, -1):
- return min(found)
+ return min(found, key=lambda each: each[0])
""")
wrong("14.1", "this minimizes the sum of the squares").diff("""
Makes the stages alike, by the squares of their sums.
-         return sum(costs[:end]), [end]
+         return sum(costs[:end]) ** 2, [end]
-         found.append((max(slowest, sum(costs[begin:end])), [*counts, end - begin]))
+         found.append((slowest + sum(costs[begin:end]) ** 2, [*counts, end - begin]))
""")
wrong("14.1", "with the ranks from last to first").diff("""
Puts the last stage first.
-         found.append((max(slowest, sum(costs[begin:end])), [*counts, end - begin]))
+         found.append((max(slowest, sum(costs[begin:end])), [end - begin, *counts]))
""")
wrong("14.1", "each layer is on one rank").diff("""
Forgets the last layer.
- return best(len(costs), ranks)[1]
+ return best(len(costs) - 1 or 1, ranks if len(costs) > ranks else ranks - 1 or 1)[1]
""")
wrong("14.1", "these are the ends of the ranks' layers").diff("""
Returns where the stages end.
- return best(len(costs), ranks)[1]
+ counts = best(len(costs), ranks)[1]
+ return [sum(counts[: rank + 1]) for rank in range(ranks)]
""")


@wrong("14.1", "and the rest is on the last, whatever they cost")
def place(costs, ranks):
    """Places by number, the rest on the last rank."""
    each = len(costs) // ranks
    return [each] * (ranks - 1) + [len(costs) - each * (ranks - 1)]


@wrong("14.1", "a stage closed before it passes the average")
def place(costs, ranks):
    """Fills each stage within the average."""
    counts, filled = [0], 0
    for cost in costs:
        if counts[-1] and filled + cost > sum(costs) / ranks and len(counts) < ranks:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += cost
    return counts


wrong("14.1", "the slowest stage costs 11 instead of 9").diff("""
Adds up the stages instead of taking the slowest.
-         found.append((max(slowest, sum(costs[begin:end])), [*counts, end - begin]))
+         found.append((slowest + sum(costs[begin:end]), [*counts, end - begin]))
""")

wrong("14.1", "need not be whole numbers, and here they are rounded down").diff("""
Drops the costs' fractions.
- return best(len(costs), ranks)[1]
+ costs = [int(cost) for cost in costs]
+ return best(len(costs), ranks)[1]
""")
wrong("14.1", "fractions of any size").diff("""
Rounds costs to one decimal.
- return best(len(costs), ranks)[1]
+ costs = [round(cost, 1) for cost in costs]
+ return best(len(costs), ranks)[1]
""")
wrong("14.1", "the slowest stage costs 5 instead of 3").diff("""
Leaves out the layers that cost nothing.
- return best(len(costs), ranks)[1]
+ free = sum(cost == 0 for cost in costs)
+ costs = [cost for cost in costs if cost]
+ counts = best(len(costs), ranks)[1]
+ return counts[:-1] + [counts[-1] + free]
""")


@wrong("14.1", "the slowest stage costs 3 instead of 2")
def place(costs, ranks):
    """Cuts the slowest stage into halves until there are enough."""
    found = [list(costs)]
    while len(found) < ranks:
        slowest = max((part for part in found if len(part) > 1), key=sum)
        cut = min(range(1, len(slowest)), key=lambda at: max(sum(slowest[:at]), sum(slowest[at:])))
        at = next(at for at, part in enumerate(found) if part is slowest)
        found[at : at + 1] = [slowest[:cut], slowest[cut:]]
    return [len(part) for part in found]


@wrong("14.1", "cuts nearest to equal shares of the total")
def place(costs, ranks):
    """Cuts at the layer nearest to each share of the total."""
    sums, cuts = [sum(costs[:at]) for at in range(len(costs) + 1)], [0]
    for rank in range(1, ranks):
        options = range(cuts[-1] + 1, len(costs) - (ranks - rank) + 1)
        cuts.append(min(options, key=lambda at: abs(sums[at] - sums[-1] * rank / ranks)))
    cuts.append(len(costs))
    return [cuts[rank + 1] - cuts[rank] for rank in range(ranks)]


@wrong("14.1", "the list is halved, and each half again")
def place(costs, ranks):
    """Halves the list, then each half."""
    if ranks == 1:
        return [len(costs)]
    left, total = ranks // 2, sum(costs)
    options = range(left, len(costs) - (ranks - left) + 1)
    cut = min(options, key=lambda at: abs(sum(costs[:at]) - total * left / ranks))
    return place(costs[:cut], left) + place(costs[cut:], ranks - left)


wrong("14.1", "costs 9.12016e+06 instead of 6.02427e+06").diff("""
Computes in a dtype that ends at 65,504.
- return best(len(costs), ranks)[1]
+ costs = torch.tensor(costs, dtype=torch.float16).tolist()
+ return best(len(costs), ranks)[1]
""")
wrong("14.1", "the slowest stage costs 2 instead of 1").diff("""
Lets a layer that costs nothing cost 1.
- return best(len(costs), ranks)[1]
+ costs = [cost or 1 for cost in costs]
+ return best(len(costs), ranks)[1]
""")

# 14.2

wrong("14.2", "it held the gradients of an earlier batch").diff("""
Resets the gradients first.
- losses = []
+ losses = []
+ if isinstance(forward, torch.nn.Module):
+     forward.zero_grad()
""")
wrong("14.2", "samples are the first dimension").diff("""
Takes every element of x for a sample.
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in zip(x.flatten().tensor_split(micros), target.tensor_split(micros), strict=True):
""")
wrong("14.2", "the model is the caller's").diff("""
Leaves training mode.
- losses = []
+ losses = []
+ if isinstance(forward, torch.nn.Module):
+     forward.eval()
""")
wrong("14.2", "7 samples in 3 micro-batches: expected a tensor").diff("""
Divides elements by samples.
- loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
+ loss = loss_fn(forward(rows), wanted) * (rows.numel() / len(x))
""")
wrong("14.2", "autograd is disabled afterwards").diff("""
Disables autograd for all that follows.
- return torch.stack(losses).sum()
+ torch.set_grad_enabled(False)
+ return torch.stack(losses).sum()
""")
wrong("14.2", "m times too much, unless it is scaled").diff("""
Scales nothing.
- loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
+ loss = loss_fn(forward(rows), wanted)
""")
wrong("14.2", "a micro-batch counts by its number of samples").diff("""
Takes the mean of the micro-batches.
- loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
+ loss = loss_fn(forward(rows), wanted) / micros
""")
wrong("14.2", "all forward passes come first").diff("""
Goes backward once, at the end.
-     loss.backward()
-     losses.append(loss.detach())
- return torch.stack(losses).sum()
+     losses.append(loss)
+ total = torch.stack(losses).sum()
+ total.backward()
+ return total.detach()
""")
wrong("14.2", "`chunk` makes different ones").diff("""
Cuts with `chunk`.
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in zip(x.chunk(micros), target.chunk(micros), strict=True):
""")
wrong("14.2", "return a detached loss").diff("""
Returns the loss with its graph.
-     losses.append(loss.detach())
+     losses.append(loss)
""")
wrong("14.2", "this is the last micro-batch's share of the loss").diff("""
Returns the last loss.
- return torch.stack(losses).sum()
+ return losses[-1]
""")
wrong("14.2", "this is the sum of the micro-batches' losses").diff("""
Adds up losses that are not scaled.
- loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
- loss.backward()
+ loss = loss_fn(forward(rows), wanted)
+ (loss * (len(rows) / len(x))).backward()
""")
wrong("14.2", "no backward pass ran").diff("""
Forgets to go backward.
-     loss.backward()
""")

wrong("14.2", "without `retain_graph`").diff("""
Keeps the graphs.
-     loss.backward()
-     losses.append(loss.detach())
- return torch.stack(losses).sum()
+     loss.backward(retain_graph=True)
+     losses.append(loss)
+ return torch.stack(losses).sum().detach()
""")
wrong("14.2", "their outputs are kept").diff("""
Computes the loss from all outputs.
-     loss = loss_fn(forward(rows), wanted) * (len(rows) / len(x))
-     loss.backward()
-     losses.append(loss.detach())
- return torch.stack(losses).sum()
+     output = forward(rows)
+     losses.append(output.detach())
+     (loss_fn(output, wanted) * (len(rows) / len(x))).backward()
+ return loss_fn(torch.cat(losses), target)
""")
wrong("14.2", "begin with the first").diff("""
Begins with the last micro-batch.
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in reversed(list(zip(x.tensor_split(micros), target.tensor_split(micros), strict=True))):
""")
wrong("14.2", "of samples that follow each other").diff("""
Takes every m-th sample.
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in [(x[at::micros], target[at::micros]) for at in range(micros)]:
""")
wrong("14.2", "the larger ones come first").diff("""
Leaves the rest to the last micro-batch.
- losses = []
+ losses, size = [], len(x) // micros
+ sizes = [size] * (micros - 1) + [len(x) - size * (micros - 1)]
- for rows, wanted in zip(x.tensor_split(micros), target.tensor_split(micros), strict=True):
+ for rows, wanted in zip(x.split(sizes), target.split(sizes), strict=True):
""")
wrong("14.2", "activations of two are alive").diff("""
Goes backward one micro-batch late.
- losses = []
+ losses, before = [], None
-     loss.backward()
-     losses.append(loss.detach())
+     if before is not None:
+         before.backward()
+     before = loss
+     losses.append(loss.detach())
- return torch.stack(losses).sum()
+ before.backward()
+ return torch.stack(losses).sum()
""")
wrong("14.2", "forward pass of the entire batch").diff("""
Computes the loss of the entire batch once more.
- return torch.stack(losses).sum()
+ with torch.no_grad():
+     return loss_fn(forward(x), target)
""")
wrong("14.2", "x is the caller's").diff("""
Changes x.
- return torch.stack(losses).sum()
+ x.zero_()
+ return torch.stack(losses).sum()
""")

# 14.3

wrong("14.3", "backward passes begin with micro-batch 0 here").diff("""
Goes backward from the last micro-batch to the first.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ first = [Action(rank, "F", micro) for micro in range(micros)]
+ return first + [Action(rank, "B", micro) for micro in reversed(range(micros))]
""")
wrong("14.3", "a backward pass after each forward pass").diff("""
Goes backward after each forward.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return [Action(rank, kind, micro) for micro in range(micros) for kind in ("F", "B")]
""")
wrong("14.3", "the two were swapped").diff("""
Swaps stage and micro-batch.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return [Action(micro, kind, rank) for kind in ("F", "B") for micro in range(micros)]
""")
wrong("14.3", "the backward pass cannot come before the forward pass").diff("""
Begins with backwards.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return [Action(rank, kind, micro) for kind in ("B", "F") for micro in range(micros)]
""")
wrong("14.3", "is another rank's").diff("""
Does every stage's work.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return [Action(stage, kind, micro) for kind in ("F", "B") for micro in range(micros) for stage in range(ranks)]
""")
wrong("14.3", "a forward pass without a backward pass trains nothing").diff("""
Forgets the backwards.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return [Action(rank, "F", micro) for micro in range(micros)]
""")
wrong("14.3", "does F for micro-batch").diff("""
Goes backward with one micro-batch less.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ first = [Action(rank, "F", micro) for micro in range(micros)]
+ return first + [Action(rank, "B", micro) for micro in range(micros - 1)]
""")
wrong("14.3", "is of stage 0").diff("""
Does the work of stage 0 on every rank.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return [Action(0, kind, micro) for kind in ("F", "B") for micro in range(micros)]
""")

wrong("14.3", "is of type str").diff("""
Writes the stage as text.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return [Action(str(rank), kind, micro) for kind in ("F", "B") for micro in range(micros)]
""")
wrong("14.3", "is of type Tensor").diff("""
Takes micro-batches from a tensor.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return [Action(rank, kind, micro) for kind in ("F", "B") for micro in torch.arange(micros)]
""")
wrong("14.3", "is of kind 'I'").diff("""
Splits the backward pass.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return [Action(rank, kind, micro) for kind in ("F", "I", "W") for micro in range(micros)]
""")
wrong("14.3", "each call returns a new list").diff("""
Appends to one list.
- def gpipe(rank, ranks, micros):
+ def gpipe(rank, ranks, micros, found=[]):
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ found += [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ return found
""")

wrong("14.3", "the lists of other ranks are right").diff("""
Alternates on the last rank.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ if rank == ranks - 1:
+     return [Action(rank, kind, micro) for micro in range(micros) for kind in ("F", "B")]
+ return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
""")
wrong("14.3", "this is 1F1B").diff("""
Goes backward as soon as a gradient can arrive.
- return [Action(rank, kind, micro) for kind in ("F", "B") for micro in range(micros)]
+ ahead = ranks - 1 - rank
+ forwards = [(2 * micro, Action(rank, "F", micro)) for micro in range(micros)]
+ backwards = [(2 * (micro + ahead) + 1, Action(rank, "B", micro)) for micro in range(micros)]
+ return [action for _, action in sorted(forwards + backwards, key=lambda each: each[0])]
""")

# 14.4

wrong("14.4", "the warm-up has one forward pass too many").diff("""
Goes as many forwards ahead as there are stages from its own on.
- ahead = min(ranks - 1 - rank, micros)
+ ahead = min(ranks - rank, micros)
""")
wrong("14.4", "count the ranks after this one, not those before it").diff("""
Counts from the wrong end.
- ahead = min(ranks - 1 - rank, micros)
+ ahead = min(rank, micros)
""")
wrong("14.4", "every rank has the warm-up of the first").diff("""
Takes the same number on every rank.
- ahead = min(ranks - 1 - rank, micros)
+ ahead = min(ranks - 1, micros)
""")
wrong("14.4", "two forward passes for each later rank").diff("""
Warms up as interleaved 1F1B.
- ahead = min(ranks - 1 - rank, micros)
+ ahead = min(2 * (ranks - 1 - rank), micros)
""")
wrong("14.4", "there may be fewer micro-batches than ranks after this one").diff("""
Does micro-batches that do not exist.
- ahead = min(ranks - 1 - rank, micros)
+ ahead = ranks - 1 - rank
- found += [Action(rank, "B", micro) for micro in range(micros - ahead, micros)]
+ found += [Action(rank, "B", micro) for micro in range(max(0, micros - ahead), micros)]
""")
wrong("14.4", "not of the newest").diff("""
Goes backward with the newest micro-batch.
-     found += [Action(rank, "F", micro), Action(rank, "B", micro - ahead)]
- found += [Action(rank, "B", micro) for micro in range(micros - ahead, micros)]
+     found += [Action(rank, "F", micro), Action(rank, "B", micro)]
+ found += [Action(rank, "B", micro) for micro in range(ahead)]
""")
wrong("14.4", "the remaining backward passes at the end are missing").diff("""
Forgets the end.
- found += [Action(rank, "B", micro) for micro in range(micros - ahead, micros)]
""")
wrong("14.4", "in a pair, the forward pass comes first").diff("""
Begins each pair with the backward.
-     found += [Action(rank, "F", micro), Action(rank, "B", micro - ahead)]
+     found += [Action(rank, "B", micro - ahead), Action(rank, "F", micro)]
""")
wrong("14.4", "each waits for the full round trip").diff("""
Goes ahead on no rank.
- ahead = min(ranks - 1 - rank, micros)
+ ahead = 0
""")
wrong("14.4", "all forward passes first: this is GPipe").diff("""
Goes ahead with all micro-batches.
- ahead = min(ranks - 1 - rank, micros)
+ ahead = micros
""")

wrong("14.4", "one forward pass too few").diff("""
Forgets the forward pass of the last rank.
- ahead = min(ranks - 1 - rank, micros)
+ ahead = max(0, min(ranks - 2 - rank, micros))
""")
wrong("14.4", "backward passes go from micro-batch 0 to the last").diff("""
Ends from the last micro-batch on.
- found += [Action(rank, "B", micro) for micro in range(micros - ahead, micros)]
+ found += [Action(rank, "B", micro) for micro in reversed(range(micros - ahead, micros))]
""")

# 14.5

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

# 14.6

wrong("14.6", "nothing was postponed: the gradients of the weights are computed in the backward pass").diff("""
Puts nothing off.
-         later.append(finish)
+         finish()
""")
wrong("14.6", "the gradient of x is postponed, too").diff("""
Leaves the gradient of x for later as well.
-         later.append(finish)
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         later.append(finish)
+         return torch.zeros_like(x), None, None
""")
wrong("14.6", "only the addition is left for later").diff("""
Computes the product in backward.
-             add(weight, rows.T @ x_rows)
-             add(bias, rows.sum(0))
-         later.append(finish)
+             add(weight, product)
+             add(bias, rows.sum(0))
+         product = rows.T @ x_rows
+         later.append(finish)
""")
wrong("14.6", "was replaced: gradients of micro-batches add up").diff("""
Replaces the gradient.
-     parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
+     parameter.grad = gradient
""")
wrong("14.6", "keeps x's graph alive").diff("""
Lets autograd record the product.
-         rows, x_rows = gradient.flatten(0, -2), x.detach().flatten(0, -2)
+         rows, x_rows = gradient.flatten(0, -2), x.flatten(0, -2)
""")
wrong("14.6", "so that the result has the weight's shape").diff("""
Transposes x.
-             add(weight, rows.T @ x_rows)
+             add(weight, x_rows.T @ rows)
""")
wrong("14.6", "the first stage's x needs no gradient").diff("""
Computes a gradient of x even where none is needed.
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         return gradient @ weight, None, None
""")
wrong("14.6", "the bias is added to every row").diff("""
Takes the mean over the rows for the bias.
-             add(bias, rows.sum(0))
+             add(bias, rows.mean(0))
""")
wrong("14.6", "the bias's is not: backward returns None for both").diff("""
Returns the bias's gradient at once.
-             add(bias, rows.sum(0))
-         later.append(finish)
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         later.append(finish)
+         return gradient @ weight if ctx.needs_input_grad[0] else None, None, rows.sum(0)
""")
wrong("14.6", "each backward appends one").diff("""
Forgets what was to be done later.
-         later.append(finish)
""")
wrong("14.6", "one function for both gradients").diff("""
Appends a function for each parameter.
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
-             later.append(finish)
+             later.append(lambda: add(weight, rows.T @ x_rows))
+             later.append(lambda: add(bias, rows.sum(0)))
""")
wrong("14.6", "x has two dimensions or more").diff("""
Takes x to have three dimensions.
-             add(weight, rows.T @ x_rows)
-             add(bias, rows.sum(0))
+             add(weight, torch.einsum("bso,bsi->oi", gradient, x.detach()))
+             add(bias, gradient.sum((0, 1)))
""")
wrong("14.6", "the gradient of the bias is computed in the backward pass").diff("""
Adds up the rows for the bias in backward.
-             add(bias, rows.sum(0))
+             add(bias, total)
-         later.append(finish)
+         total = rows.sum(0)
+         later.append(finish)
""")
wrong("14.6", "append the function, not what it returns").diff("""
Calls the function that it should append.
-         later.append(finish)
+         later.append(finish())
""")
wrong("14.6", "the function computes the bias's gradient, too").diff("""
Forgets the bias.
-             add(bias, rows.sum(0))
""")
wrong("14.6", "it is added twice").diff("""
Adds the weight's gradient twice.
-             add(weight, rows.T @ x_rows)
+             product = rows.T @ x_rows
+             add(weight, product)
+             add(weight, product)
""")
wrong("14.6", "backward returns it first").diff("""
Leaves the gradient of x out.
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         return None, None, None
""")
wrong("14.6", "expected 3, got 1").diff("""
Keeps the newest function alone.
-         later.append(finish)
+         later[:] = [finish]
""")
wrong("14.6", "no second forward").diff("""
Computes the output again, and goes backward from there.
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
-             later.append(finish)
+             later.append(lambda: F.linear(x.detach(), weight, bias).backward(gradient))
""")
wrong("14.6", "x is that of another forward pass").diff("""
Keeps one x for all micro-batches.
- class Linear(torch.autograd.Function):
+ kept = {}
+ class Linear(torch.autograd.Function):
-             ctx.save_for_backward(x, weight, bias)
+             kept["x"] = x
+             ctx.save_for_backward(weight, bias)
-             x, weight, bias = ctx.saved_tensors
+             x, (weight, bias) = kept["x"], ctx.saved_tensors
""")
wrong("14.6", "not all the work in `later`").diff("""
Lets the first function do everything.
- class Linear(torch.autograd.Function):
+ waiting = []
+ class Linear(torch.autograd.Function):
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             waiting.append((rows, x_rows))
+             def finish():
+                 while waiting:
+                     rows, x_rows = waiting.pop()
+                     add(weight, rows.T @ x_rows)
+                     add(bias, rows.sum(0))
""")
wrong("14.6", "this is another micro-batch's").diff("""
Lets each function do the oldest work that is left.
- class Linear(torch.autograd.Function):
+ waiting = []
+ class Linear(torch.autograd.Function):
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             waiting.append((rows, x_rows))
+             def finish():
+                 rows, x_rows = waiting.pop(0)
+                 add(weight, rows.T @ x_rows)
+                 add(bias, rows.sum(0))
""")

wrong("14.6", "this is the newest micro-batch's").diff("""
Lets each function do the newest work that is left.
- class Linear(torch.autograd.Function):
+ waiting = []
+ class Linear(torch.autograd.Function):
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             waiting.append((rows, x_rows))
+             def finish():
+                 rows, x_rows = waiting.pop()
+                 add(weight, rows.T @ x_rows)
+                 add(bias, rows.sum(0))
""")
wrong("14.6", "each backward pass needs its own, from `ctx`").diff("""
Takes the inputs in the order of the forward passes.
- class Linear(torch.autograd.Function):
+ kept = []
+ class Linear(torch.autograd.Function):
-             ctx.save_for_backward(x, weight, bias)
+             kept.append(x)
+             ctx.save_for_backward(weight, bias)
-             x, weight, bias = ctx.saved_tensors
+             x, (weight, bias) = kept.pop(0), ctx.saved_tensors
""")
wrong("14.6", "the gradient of the weight is computed 2 times").diff("""
Multiplies twice where there is a gradient already.
-             add(weight, rows.T @ x_rows)
+             add(weight, rows.T @ x_rows if weight.grad is None else (rows.T @ x_rows + rows.T @ x_rows) / 2)
""")
wrong("14.6", "the output is computed 2 times").diff("""
Computes the output twice.
-             return F.linear(x, weight, bias)
+             F.linear(x, weight)
+             return F.linear(x, weight, bias)
""")
wrong("14.6", "the gradient of x is computed 2 times").diff("""
Computes the gradient of x twice.
-         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
+         gradient @ weight
+         return gradient @ weight if ctx.needs_input_grad[0] else None, None, None
""")
wrong("14.6", "for the parameters of its own call").diff("""
Keeps the parameters of the last call.
- class Linear(torch.autograd.Function):
+ held = []
+ class Linear(torch.autograd.Function):
-             ctx.save_for_backward(x, weight, bias)
+             held[:] = [weight, bias]
+             ctx.save_for_backward(x, weight, bias)
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             def finish():
+                 add(held[0], rows.T @ x_rows)
+                 add(held[1], rows.sum(0))
""")
wrong("14.6", "the gradient of y afterwards").diff("""
Clears the gradient of y.
-             def finish():
-                 add(weight, rows.T @ x_rows)
-                 add(bias, rows.sum(0))
+             def finish():
+                 add(weight, rows.T @ x_rows)
+                 add(bias, rows.sum(0))
+                 rows.zero_()
""")

wrong("14.6", "over all dimensions of the gradient of y except the last").diff("""
Adds up the first dimension for the bias.
-             add(bias, rows.sum(0))
+             add(bias, gradient.sum(0))
""")
wrong("14.6", "it needs its own memory").diff("""
Takes the gradient of y for the bias's if there is one row.
-             add(bias, rows.sum(0))
+             add(bias, rows.sum(0) if len(rows) > 1 else rows[0])
""")
wrong("14.6", "each keeps its own `later`").diff("""
Appends to the newest list.
- class Linear(torch.autograd.Function):
+ linear_later.newest = later
+ class Linear(torch.autograd.Function):
-         later.append(finish)
+         linear_later.newest.append(finish)
""")
wrong("14.6", "only the optimizer changes parameters").diff("""
Takes a step, too.
-             add(bias, rows.sum(0))
+             add(bias, rows.sum(0))
+             weight.data.sub_(0.1 * weight.grad)
""")
wrong("14.6", "`later` is the caller's").diff("""
Takes the functions out of the caller's list.
-             add(bias, rows.sum(0))
+             add(bias, rows.sum(0))
+             later[:] = later[1:]
""")
wrong("14.6", "it has not added to `.grad` of the weight").diff("""
Keeps a gradient that is there.
-             add(weight, rows.T @ x_rows)
+             product = rows.T @ x_rows
+             weight.grad = product if weight.grad is None else weight.grad
""")

# 14.7

wrong("14.7", "[20, 28, 30], got [28, 30]").diff("""
Reduces for two stages at most.
- return sorted({actions[at].stage: at for at in done}.values())
+ return sorted({actions[at].stage: at for at in done}.values())[-2:]
""")
wrong("14.7", "gradients are complete after 1B0").diff("""
Waits for a second micro-batch.
- return sorted({actions[at].stage: at for at in done}.values())
+ return sorted({actions[at].stage: at for at in done if len(actions) > 2}.values())
""")
wrong("14.7", "one message for each stage, not one for each micro-batch").diff("""
Reduces after each micro-batch, whatever the stage of ZeRO.
- if zero == 2:
-     return done
- return sorted({actions[at].stage: at for at in done}.values())
+ return done
""")
wrong("14.7", "ZeRO-2 keeps no unsharded gradients").diff("""
Reduces once, whatever the stage of ZeRO.
- if zero == 2:
-     return done
""")
wrong("14.7", "need not be the micro-batch with the largest number").diff("""
Waits for the micro-batch with the largest number.
- return sorted({actions[at].stage: at for at in done}.values())
+ newest = max(action.micro for action in actions)
+ return [at for at in done if actions[at].micro == newest]
""")
wrong("14.7", "one position for all stages").diff("""
Reduces everything at the end.
- return sorted({actions[at].stage: at for at in done}.values())
+ return [len(actions) - 1]
""")
wrong("14.7", "it has no B").diff("""
Looks for whole backwards alone.
- done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
+ done = [at for at, action in enumerate(actions) if action.kind == "B"]
""")
wrong("14.7", "those of the weights come with W").diff("""
Takes I for the end of a backward.
- done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
+ done = [at for at, action in enumerate(actions) if action.kind in ("B", "I")]
""")
wrong("14.7", "a micro-batch's gradients are complete once").diff("""
Reduces after I and after W.
- done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
+ done = [at for at, action in enumerate(actions) if action.kind != "F"]
""")
wrong("14.7", "positions are in the order of the list").diff("""
Sorts by stage.
- return sorted({actions[at].stage: at for at in done}.values())
+ found = {actions[at].stage: at for at in done}
+ return [found[stage] for stage in sorted(found)]
""")
wrong("14.7", "not after the first").diff("""
Keeps the first backward of each stage.
- return sorted({actions[at].stage: at for at in done}.values())
+ return sorted({actions[at].stage: at for at in reversed(done)}.values())
""")
wrong("14.7", "count all actions of the list, not only backward passes").diff("""
Counts among the backwards.
- done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
+ actions = [action for action in actions if action.kind in ("B", "W")]
+ done = list(range(len(actions)))
""")
wrong("14.7", "it has no W").diff("""
Looks for split backwards alone.
- done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
+ done = [at for at, action in enumerate(actions) if action.kind == "W"]
""")
wrong("14.7", "complete once for each stage").diff("""
Reduces all stages' gradients of a micro-batch together.
-     return done
+     return sorted({actions[at].micro: at for at in done}.values())
""")
wrong("14.7", "which need not be the last one of the list").diff("""
Takes one micro-batch for the last of all stages.
- return sorted({actions[at].stage: at for at in done}.values())
+ return [at for at in done if actions[at].micro == actions[done[-1]].micro]
""")
wrong("14.7", "full and split backward passes add to the same gradients").diff("""
Reduces once for each kind of backward.
- return sorted({actions[at].stage: at for at in done}.values())
+ return sorted({(actions[at].stage, actions[at].kind): at for at in done}.values())
""")
wrong("14.7", "a forward pass computes no gradients: they are complete after B or W").diff("""
Reduces after forwards.
- done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
+ done = [at for at, action in enumerate(actions) if action.kind == "F"]
""")
wrong("14.7", "5 is missing").diff("""
Forgets the last backward of ZeRO-2.
-     return done
+     return done[:-1]
""")
wrong("14.7", "the list is the caller's").diff("""
Changes the list.
- done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
+ done = [at for at, action in enumerate(actions) if action.kind in ("B", "W")]
+ actions.append(actions[-1])
""")
