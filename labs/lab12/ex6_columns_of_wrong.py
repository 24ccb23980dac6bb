"""Wrong answers to exercise 12.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("12.6", "the gap is the last entry").diff("""
Has no gap.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return sizes
""")
wrong("12.6", "`//` divides").diff("""
Computes with floats.
-     rows = -(-shape[dim] // ranks)
+     rows = float(-(-shape[dim] // ranks))
""")
wrong("12.6", "needs no gap").diff("""
Adds a whole step where none is missing.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ step = max(1, 16 // itemsize)
+ return [*sizes, step - sum(sizes) % step]
""")
wrong("12.6", "sizes are in elements").diff("""
Gives the gap in bytes.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return [*sizes, -(sum(sizes) * itemsize) % 16]
""")
wrong("12.6", "not of 16 elements").diff("""
Pads to 16 elements.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return [*sizes, -sum(sizes) % 16]
""")
wrong("12.6", "4 elements are 16 bytes for float32 alone").diff("""
Pads to 4 elements, whatever their size.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return [*sizes, -sum(sizes) % 4]
""")
wrong("12.6", "one gap at the end is enough").diff("""
Aligns every column.
-     sizes.append(rows * prod(shape[:dim]) * prod(shape[dim + 1 :]))
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+     size = rows * prod(shape[:dim]) * prod(shape[dim + 1 :])
+     sizes.append(size + -size % max(1, 16 // itemsize))
+ return [*sizes, 0]
""")
wrong("12.6", "the entire buffer may be one by chance").diff("""
Aligns the whole buffer.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ return [*sizes, -(ranks * sum(sizes)) % max(1, 16 // itemsize)]
""")
wrong("12.6", "as wide as the *largest* shard").diff("""
Rounds down.
-     rows = -(-shape[dim] // ranks)
+     rows = shape[dim] // ranks
""")
wrong("12.6", "rows are never split").diff("""
Cuts by elements.
-     rows = -(-shape[dim] // ranks)
-     sizes.append(rows * prod(shape[:dim]) * prod(shape[dim + 1 :]))
+     sizes.append(-(-prod(shape) // ranks))
""")
wrong("12.6", "the parameter is split along `dim`").diff("""
Cuts along dimension 0 always.
-     rows = -(-shape[dim] // ranks)
-     sizes.append(rows * prod(shape[:dim]) * prod(shape[dim + 1 :]))
+     sizes.append(-(-shape[0] // ranks) * prod(shape[1:]))
""")
wrong("12.6", "`shapes` and `dims` afterwards").diff("""
Takes dimensions from the caller's list.
- return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
+ dims.pop()
+ return [*sizes, -sum(sizes) % max(1, 16 // itemsize)]
""")
