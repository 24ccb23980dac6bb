"""Wrong answers to exercise 11.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("11.4", "may be anything").diff("""
Does not wait.
- unit.across.wait()
""")
wrong("11.4", "then there is nothing to do").diff("""
Cannot bear a unit with nothing under way.
- if unit.across is None:
-     return
""")
wrong("11.4", "is delivered twice").diff("""
Does not forget what it has finished.
- unit.across = unit.mean = None
""")
wrong("11.4", "the other way round").diff("""
Delivers and then waits.
- unit.across.wait()

  unit.deliver(unit.mean)
+ unit.across.wait()
""")
wrong("11.4", "divided again").diff("""
Makes a mean of the mean.
- unit.deliver(unit.mean)
+ unit.deliver(unit.mean / unit.replicas.size())
""")
wrong("11.4", "earlier micro-batches are gone").diff("""
Sets `.grad` in place of adding to it.
- unit.deliver(unit.mean)
+ unit.flat.shard.grad = unit.mean
""")
wrong("11.4", "never handed over").diff("""
Waits, and that is all.
- unit.deliver(unit.mean)
""")
wrong("11.4", "a buffer that has been given away").diff("""
Keeps the mean.
- unit.across = unit.mean = None
+ unit.across = None
""")
wrong("11.4", "takes no other dtype").diff("""
Delivers in double.
- unit.deliver(unit.mean)
+ unit.deliver(unit.mean.double())
""")
wrong("11.4", "gives the memory of the copy away").diff("""
Delivers a copy.
- unit.deliver(unit.mean)
+ unit.deliver(unit.mean.clone())
""")
wrong("11.4", "`wait` returns nothing").diff("""
Takes the result from the handle.
- unit.across.wait()
- unit.deliver(unit.mean)
+ unit.deliver(unit.across.wait())
""")
wrong("11.4", "both belong under one condition").diff("""
Delivers in any case.
- if unit.across is None:
-     return
- unit.across.wait()
+ if unit.across is not None:
+     unit.across.wait()
""")


@wrong("11.4", "is not to be forgotten")
def finish_across(unit):
    """Forgets in any case."""
    if unit.across is not None:
        unit.across.wait()
        unit.deliver(unit.mean)
    unit.across = unit.mean = None


wrong("11.4", "has been waited for once is there").diff("""
Waits twice, to be sure.
  unit.across.wait()
+ unit.across.wait()
""")
wrong("11.4", "dtype delivered: expected torch.bfloat16").diff("""
Delivers in float32.
- unit.deliver(unit.mean)
+ unit.deliver(unit.mean.float())
""")
