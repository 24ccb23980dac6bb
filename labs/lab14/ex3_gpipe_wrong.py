"""Wrong answers to exercise 14.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
