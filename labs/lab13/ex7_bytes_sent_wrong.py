"""Wrong answers to exercise 13.7, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("13.7", "one is missing").diff("""
Counts an all-reduce once around the ring.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 4 * tokens * width * per_element, 3 * parameters * per_element
""")
wrong("13.7", "two are missing").diff("""
Counts the MLP's two messages, each once around the ring.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 2 * tokens * width * per_element, 3 * parameters * per_element
""")
wrong("13.7", "these are not data-parallel ranks").diff("""
Divides the tokens among the ranks.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 8 * tokens / ranks * width * per_element, 3 * parameters * per_element
""")
wrong("13.7", "because it already has one shard").diff("""
Leaves the factor of the ring out.
- per_element = itemsize * (ranks - 1) / ranks
+ per_element = itemsize
""")
wrong("13.7", "this is a number of elements, not of bytes").diff("""
Counts elements.
- per_element = itemsize * (ranks - 1) / ranks
+ per_element = (ranks - 1) / ranks
""")
wrong("13.7", "again for the backward pass").diff("""
Gathers once, as if units stayed whole.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 8 * tokens * width * per_element, 2 * parameters * per_element
""")
wrong("13.7", "which is half an all-reduce").diff("""
All-reduces the gradients.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 8 * tokens * width * per_element, 4 * parameters * per_element
""")
wrong("13.7", "tensor parallelism first").diff("""
Returns the two in the other order.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 3 * parameters * per_element, 8 * tokens * width * per_element
""")
wrong("13.7", "`parameters` is given").diff("""
Counts the parameters of a block itself.
- per_element = itemsize * (ranks - 1) / ranks
+ parameters = 12 * width**2 + 13 * width
+ per_element = itemsize * (ranks - 1) / ranks
""")
wrong("13.7", "an element has `itemsize` bytes").diff("""
Takes elements for float32.
- per_element = itemsize * (ranks - 1) / ranks
+ per_element = 4 * (ranks - 1) / ranks
""")
wrong("13.7", "gradients have `itemsize` bytes per element").diff("""
Reduces gradients in float32.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ gradients = 4 * (ranks - 1) / ranks
+ return 8 * tokens * width * per_element, parameters * (2 * per_element + gradients)
""")
wrong("13.7", "what the loss sends does not belong to it").diff("""
Counts five all-reduces.
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ return 10 * tokens * width * per_element, 3 * parameters * per_element
""")
wrong("13.7", "nothing is rounded").diff("""
Sends whole elements.
- per_element = itemsize * (ranks - 1) / ranks
- return 8 * tokens * width * per_element, 3 * parameters * per_element
+ activations, weights = (each * (ranks - 1) // ranks * itemsize for each in (tokens * width, parameters))
+ return 8 * activations, 3 * weights
""")
