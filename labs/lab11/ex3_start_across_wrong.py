"""Wrong answers to exercise 11.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("11.3", "overlaps nothing").diff("""
Waits at once.
  unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across.wait()
""")
wrong("11.3", "every further host makes the step larger").diff("""
Sums.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean, unit.replicas)
""")
wrong("11.3", "before the second stage").diff("""
Accumulates first and reduces what is in `.grad`.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.deliver(unit.mean)
+ unit.across = comm.all_reduce(unit.flat.shard.grad, unit.replicas, comm.MEAN)
""")
wrong("11.3", "a copy was reduced").diff("""
Reduces a copy, and forgets it.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean.clone(), unit.replicas, comm.MEAN)
""")
wrong("11.3", "nobody can wait for it").diff("""
Drops the handle.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
""")
wrong("11.3", "the sharding group has had its turn").diff("""
Reduces over the sharding group once more.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean, unit.group, comm.MEAN)
""")
wrong("11.3", "is the task of `finish_across`").diff("""
Does it all in one go.
  unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across.wait()
+ unit.deliver(unit.mean)
""")


@wrong("11.3", "each trains a model of its own")
def start_across(unit):
    """Takes the mean of the sharding group for the mean of all."""


wrong("11.3", "the world has other shards").diff("""
Reduces over all ranks.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean, comm.world(), comm.MEAN)
""")
wrong("11.3", "divided by 2, whatever").diff("""
Takes R for 2.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.mean /= 2
+ unit.across = comm.all_reduce(unit.mean, unit.replicas)
""")
wrong("11.3", "divided twice").diff("""
Divides, and asks for a mean.
  def start_across(unit):
+     unit.mean /= unit.replicas.size()
""")
wrong("11.3", "before, during or after the sum").diff("""
Divides while the sum is under way.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = comm.all_reduce(unit.mean, unit.replicas)
+ unit.mean /= unit.replicas.size()
""")
wrong("11.3", "in float32 twice as many bytes").diff("""
Reduces in float32, whatever the mean is in.
  def start_across(unit):
+     unit.mean = unit.mean.float()
""")
wrong("11.3", "another costs bytes").diff("""
Reduces a copy, and keeps that.
  def start_across(unit):
+     unit.mean = unit.mean.clone()
""")
wrong("11.3", "stays until the next step").diff("""
Keeps the first stage's mean, too.
  def start_across(unit):
+     unit.inside = unit.mean.clone()
""")
wrong("11.3", "until the other hosts have come as far").diff("""
Meets the other hosts first.
  def start_across(unit):
+     dist.barrier(unit.replicas)
""")
wrong("11.3", "no collective of `comm` is issued").diff("""
Goes past `comm`.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ unit.across = dist.all_reduce(unit.mean, comm.MEAN, unit.replicas, async_op=True)
""")
wrong("11.3", "crosses the slow link twice").diff("""
Sums, and makes a mean in a second one.
  def start_across(unit):
+     comm.all_reduce(unit.mean, unit.replicas)
""")
wrong("11.3", "every replica has to take part").diff("""
Lets the first host speak for all.
- unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
+ if dist.get_rank() == 0:
+     unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
""")


@wrong("11.3", "a replica that is alone reduces too")
def start_across(unit):
    """Leaves out a replica that is alone."""
    assert unit.mean is not None
    if unit.replicas.size() == 1:
        return
    unit.across = comm.all_reduce(unit.mean, unit.replicas, comm.MEAN)
