"""Wrong answers to exercise 14.7, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

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
