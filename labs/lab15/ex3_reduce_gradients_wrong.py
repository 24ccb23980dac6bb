"""Wrong answers to exercise 15.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("15.3", "has the contribution of its own tokens only").diff("""
Forgets the sum over the tensor-parallel ranks.
-     if name in summands:
-         comm.all_reduce(gradient, tp).wait()
""")
wrong("15.3", "their contributions add up").diff("""
Averages over both groups.
-         comm.all_reduce(gradient, tp).wait()
+         comm.all_reduce(gradient, tp, comm.MEAN).wait()
""")
wrong("15.3", "so divide by the number of ranks of `dp`").diff("""
Sums over the data-parallel ranks.
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     comm.all_reduce(gradient, dp).wait()
""")
wrong("15.3", "a mean over all ranks adds up gradients of different parts").diff("""
Averages over all ranks, as if there was no tensor parallelism.
-     if name in summands:
-         comm.all_reduce(gradient, tp).wait()
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     comm.all_reduce(gradient, comm.world(), comm.MEAN).wait()
""")
wrong("15.3", "their gradients belong to different elements").diff("""
Sums all gradients over the tensor-parallel ranks.
-     if name in summands:
-         comm.all_reduce(gradient, tp).wait()
+     comm.all_reduce(gradient, tp).wait()
""")
wrong("15.3", "`tp` and `dp` have changed places").diff("""
Sums over the wrong group.
-         comm.all_reduce(gradient, tp).wait()
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+         comm.all_reduce(gradient, dp).wait()
+         comm.all_reduce(gradient, tp, comm.MEAN).wait()
+     else:
+         comm.all_reduce(gradient, dp, comm.MEAN).wait()
""")
wrong("15.3", "it mixes different parts of this parameter").diff("""
Reverses the test, and the groups.
-     if name in summands:
-         comm.all_reduce(gradient, tp).wait()
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     if name in summands:
+         comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     else:
+         comm.all_reduce(gradient, tp, comm.MEAN).wait()
""")
wrong("15.3", "the mean over `dp` is missing").diff("""
Reduces each gradient over one group.
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     else:
+         comm.all_reduce(gradient, dp, comm.MEAN).wait()
""")
wrong("15.3", "only starts: until `.wait()`").diff("""
Does not wait for the sum.
-         comm.all_reduce(gradient, tp).wait()
+         comm.all_reduce(gradient, tp)
""")
wrong("15.3", "not of all ranks").diff("""
Divides by the number of all ranks.
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     comm.all_reduce(gradient, dp).wait()
+     gradient /= comm.world().size()
""")
wrong("15.3", "this gradient is unchanged: ranks of `dp`").diff("""
Makes a new tensor.
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     total = gradient.clone()
+     comm.all_reduce(total, dp, comm.MEAN).wait()
+     gradient = total
""")
wrong("15.3", "reduce each gradient once per group").diff("""
Averages twice.
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     comm.all_reduce(gradient, dp, comm.MEAN).wait()
""")
wrong("15.3", "divide by `dp.size()`").diff("""
Divides by 2, the size of `dp` in the lab.
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+     comm.all_reduce(gradient, dp).wait()
+     gradient /= 2
""")
wrong("15.3", "whose order is the same on all ranks").diff("""
Goes through the set, whose order is that of this rank.
- for name, gradient in gradients.items():
-     if name in summands:
-         comm.all_reduce(gradient, tp).wait()
+ for name in summands:
+     comm.all_reduce(gradients[name], tp).wait()
+ for gradient in gradients.values():
""")
wrong("15.3", "the check counts calls of `comm`").diff("""
Calls torch, of which the lab's log knows nothing.
- for name, gradient in gradients.items():
-     if name in summands:
-         comm.all_reduce(gradient, tp).wait()
-     comm.all_reduce(gradient, dp, comm.MEAN).wait()
+ import torch.distributed as dist
+ for name, gradient in gradients.items():
+     if name in summands:
+         dist.all_reduce(gradient, group=tp)
+     dist.all_reduce(gradient, group=dp)
+     gradient /= dp.size()
""")
