"""Wrong answers to exercise 14.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
