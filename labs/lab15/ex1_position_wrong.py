"""Wrong answers to exercise 15.1, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("15.1", "here they count along the first").diff("""
Counts along the first axis.
- for axis, size in reversed(sizes.items()):
+ for axis, size in sizes.items():
""")
wrong("15.1", "take the quotient modulo the axis's size").diff("""
Never begins anew.
-     places[axis] = rank // stride % size
+     places[axis] = rank // stride
""")
wrong("15.1", "not the size of the next one").diff("""
Takes the size of the next axis for the step.
-     stride *= size
+     stride = size
""")
wrong("15.1", "divide by their product first").diff("""
Takes the remainder of the number itself.
-     places[axis] = rank // stride % size
+     places[axis] = rank % size
""")
wrong("15.1", "others have larger steps").diff("""
Takes neighbouring numbers for a group on every axis.
-     first = rank - places[axis] * stride
-     groups[axis] = [first + place * stride for place in range(size)]
+     first = rank // size * size
+     groups[axis] = [first + place for place in range(size)]
""")
wrong("15.1", "the group contains the rank itself").diff("""
Leaves itself out.
-     groups[axis] = [first + place * stride for place in range(size)]
+     groups[axis] = [first + place * stride for place in range(size) if place != places[axis]]
""")
wrong("15.1", "does not depend on the rank that asks").diff("""
Begins with itself, and goes round.
-     groups[axis] = [first + place * stride for place in range(size)]
+     groups[axis] = [first + (places[axis] + place) % size * stride for place in range(size)]
""")
wrong("15.1", "return the ranks' numbers").diff("""
Numbers the ranks within their group.
-     groups[axis] = [first + place * stride for place in range(size)]
+     groups[axis] = list(range(size))
""")
wrong("15.1", "here it begins with the rank that asks").diff("""
Counts from itself.
-     groups[axis] = [first + place * stride for place in range(size)]
+     groups[axis] = [rank + place * stride for place in range(size)]
""")
wrong("15.1", "`sizes` is the caller's").diff("""
Takes the sizes apart.
- for axis, size in reversed(sizes.items()):
+ while sizes:
+     axis, size = sizes.popitem()
""")
wrong("15.1", "the same place on this axis").diff("""
Takes the ranks with the same place.
- return places, groups
+ total = stride
+ stride = 1
+ for axis, size in reversed(sizes.items()):
+     groups[axis] = [other for other in range(total) if other // stride % size == places[axis]]
+     stride *= size
+ return places, groups
""")
