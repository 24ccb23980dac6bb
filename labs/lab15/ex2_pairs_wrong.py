"""Wrong answers to exercise 15.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("15.2", "stages that are not neighbours exchange nothing").diff("""
Treats a pipeline like a collective.
-     of_group = pairwise if axis == "pp" else partial(combinations, r=2)
+     of_group = partial(combinations, r=2)
""")
wrong("15.2", "this takes neighbours only").diff("""
Takes neighbours on every axis.
-     of_group = pairwise if axis == "pp" else partial(combinations, r=2)
+     of_group = pairwise
""")
wrong("15.2", "which is one of several algorithms").diff("""
Takes each collective for a ring.
-     found[axis] = sorted(pair for group in groups for pair in of_group(group))
+     found[axis] = sorted(pair for group in groups for pair in of_group(group))
+     if axis != "pp":
+         rings = [[*zip(group, group[1:]), (group[0], group[-1])] for group in groups]
+         found[axis] = sorted({pair for ring in rings for pair in ring})
""")
wrong("15.2", "is no ring").diff("""
Closes the pipeline to a ring.
-     found[axis] = sorted(pair for group in groups for pair in of_group(group))
+     found[axis] = sorted(pair for group in groups for pair in of_group(group))
+     if axis == "pp" and mesh.pp > 2:
+         found[axis] = sorted(found[axis] + [(group[0], group[-1]) for group in groups])
""")
wrong("15.2", "each pair occurs once").diff("""
Takes a group once for each of its ranks.
-     groups = {tuple(mesh.peers(rank, axis)) for rank in range(mesh.ranks)}
+     groups = [tuple(mesh.peers(rank, axis)) for rank in range(mesh.ranks)]
""")
wrong("15.2", "each pair occurs twice").diff("""
Counts both directions.
-     found[axis] = sorted(pair for group in groups for pair in of_group(group))
+     one_way = [pair for group in groups for pair in of_group(group)]
+     found[axis] = sorted(one_way + [(b, a) for a, b in one_way])
""")
wrong("15.2", "of rank 0's group only").diff("""
Takes rank 0's group for all.
-     groups = {tuple(mesh.peers(rank, axis)) for rank in range(mesh.ranks)}
+     groups = {tuple(mesh.peers(0, axis))}
""")
wrong("15.2", "places within the group").diff("""
Numbers ranks within their group.
-     found[axis] = sorted(pair for group in groups for pair in of_group(group))
+     found[axis] = sorted(pair for group in groups for pair in of_group(range(len(group))))
""")
wrong("15.2", "agree on all other axes").diff("""
Pairs all ranks with different places on an axis.
-     found[axis] = sorted(pair for group in groups for pair in of_group(group))
+     every = combinations(range(mesh.ranks), 2)
+     found[axis] = sorted((a, b) for a, b in every if mesh.place(a, axis) != mesh.place(b, axis))
""")
wrong("15.2", "an axis with one rank has no pairs").diff("""
Also lists axes with one rank.
- for axis in mesh.divided:
+ for axis in ("pp", "dp", "tp"):
""")
