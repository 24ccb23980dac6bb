"""Wrong answers to exercise 15.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("15.5", "two in the forward and two in the backward pass").diff("""
Counts the forward pass only.
- sums = 4 * blocks + (place == 0) + (place == last)
+ sums = 2 * blocks + (place == 0) + (place == last)
""")
wrong("15.5", "each has one more all-reduce").diff("""
Counts blocks only.
- sums = 4 * blocks + (place == 0) + (place == last)
+ sums = 4 * blocks
""")
wrong("15.5", "embedding and head are on the first and the last stage only").diff("""
Gives every stage an embedding and a head.
- sums = 4 * blocks + (place == 0) + (place == last)
+ sums = 4 * blocks + 2
""")
wrong("15.5", "it all-reduces three numbers per token").diff("""
Leaves the loss out.
- of_token = sums * width + 3 * (place == last)
+ of_token = sums * width
""")
wrong("15.5", "the loss is computed on the last stage only").diff("""
Computes the loss everywhere.
- of_token = sums * width + 3 * (place == last)
+ of_token = sums * width + 3
""")
wrong("15.5", "2 (t - 1) / t of the data").diff("""
Counts an all-reduce once around the ring.
-     "tp": 2 * (mesh.tp - 1) / mesh.tp * micros * tokens * of_token * itemsize,
+     "tp": (mesh.tp - 1) / mesh.tp * micros * tokens * of_token * itemsize,
""")
wrong("15.5", "and are reduced once").diff("""
Reduces the gradients of each micro-batch.
-     "dp": 2 * (mesh.dp - 1) / mesh.dp * parameters * itemsize,
+     "dp": 2 * (mesh.dp - 1) / mesh.dp * parameters * itemsize * micros,
""")
wrong("15.5", "`parameters` is this rank's part already").diff("""
Divides the parameters again.
-     "dp": 2 * (mesh.dp - 1) / mesh.dp * parameters * itemsize,
+     "dp": 2 * (mesh.dp - 1) / mesh.dp * parameters / mesh.pp / mesh.tp * itemsize,
""")
wrong("15.5", "not over all ranks").diff("""
Reduces gradients over all ranks.
-     "dp": 2 * (mesh.dp - 1) / mesh.dp * parameters * itemsize,
+     "dp": 2 * (mesh.ranks - 1) / mesh.ranks * parameters * itemsize,
""")
wrong("15.5", "the first and the last have one neighbour").diff("""
Gives every stage two neighbours.
- neighbours = (place > 0) + (place < last)
+ neighbours = 2 if last else 0
""")
wrong("15.5", "gradients of activations are sent, too").diff("""
Counts activations only.
- neighbours = (place > 0) + (place < last)
+ neighbours = place < last
""")
wrong("15.5", "it has no factor (p - 1) / p").diff("""
Treats messages like a collective.
-     "pp": float(neighbours * micros * tokens * width * itemsize),
+     "pp": (mesh.pp - 1) / mesh.pp * neighbours * micros * tokens * width * itemsize,
""")
wrong("15.5", "every rank of a tp group sends its copy").diff("""
Divides the activations among the tensor-parallel ranks.
-     "pp": float(neighbours * micros * tokens * width * itemsize),
+     "pp": neighbours * micros * tokens * width * itemsize / mesh.tp,
""")
wrong("15.5", "a single stage has no neighbour, an end stage has one").diff("""
Counts two neighbours always.
- neighbours = (place > 0) + (place < last)
+ neighbours = 2
""")
wrong("15.5", "it has no factor 2 (p - 1) / p").diff("""
Treats messages like all-reduces.
-     "pp": float(neighbours * micros * tokens * width * itemsize),
+     "pp": 2 * (mesh.pp - 1) / mesh.pp * neighbours * micros * tokens * width * itemsize,
""")
wrong("15.5", "the embedding has an all-reduce, too").diff("""
Forgets the embedding.
- sums = 4 * blocks + (place == 0) + (place == last)
+ sums = 4 * blocks + (place == last)
""")
wrong("15.5", "have one all-reduce each, in one of the two passes").diff("""
Counts embedding and head in both passes.
- sums = 4 * blocks + (place == 0) + (place == last)
+ sums = 4 * blocks + 2 * (place == 0) + 2 * (place == last)
""")
wrong("15.5", "is in the result, too, with 0 bytes").diff("""
Leaves axes with one rank out.
- return {
+ found = {
- }
+ }
+ return {axis: found[axis] for axis in mesh.divided}
""")
wrong("15.5", "expected 147,456, got 147,520").diff("""
Adds something that no slip explains.
-     "tp": 2 * (mesh.tp - 1) / mesh.tp * micros * tokens * of_token * itemsize,
+     "tp": 2 * (mesh.tp - 1) / mesh.tp * micros * tokens * of_token * itemsize + 64,
""")
wrong("15.5", "a stage in the middle has two neighbours").diff("""
Counts one neighbour in every pipeline.
- neighbours = (place > 0) + (place < last)
+ neighbours = mesh.pp > 1
""")
