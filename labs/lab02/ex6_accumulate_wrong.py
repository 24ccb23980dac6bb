"""Wrong answers to exercise 2.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("2.6", "what is reduced is reduced again").diff("""
Never turns communication off: a reduction per micro-batch.
- for number, batch in enumerate(micro_batches, start=1):
-     reducer.sync = number == len(micro_batches)
+ for batch in micro_batches:
""")
wrong("2.6", "divide each loss by k").diff("""
Adds up k gradients without dividing.
- (loss_of(batch) / len(micro_batches)).backward()
+ loss_of(batch).backward()
""")
wrong("2.6", "the gradients of those before it were dropped").diff("""
Drops the gradients between micro-batches, like a zero_grad() in the wrong loop.
  for number, batch in enumerate(micro_batches, start=1):
+     for param in reducer.bucket_of:
+         param.grad = None
""")


@wrong("2.6", "keeps the graphs of all micro-batches alive")
def accumulate(micro_batches, loss_of, reducer):
    """One backward over the mean of all losses: right gradient, k times the activations."""
    sum(loss_of(batch) / len(micro_batches) for batch in micro_batches).backward()


@wrong("2.6", "needs all their activations at once")
def accumulate(micro_batches, loss_of, reducer):
    """One large batch: right gradient, and nothing is accumulated."""
    loss_of(torch.cat(micro_batches)).backward()


@wrong("2.6", "the ranks' gradients never meet")
def accumulate(micro_batches, loss_of, reducer):
    """Turns communication off for all of them, the last included."""
    reducer.sync = False
    for batch in micro_batches:
        (loss_of(batch) / len(micro_batches)).backward()
    reducer.sync = True


@wrong("2.6", "what comes after it stays on its rank")
def accumulate(micro_batches, loss_of, reducer):
    """Communicates in the first micro-batch, not in the last."""
    for number, batch in enumerate(micro_batches):
        reducer.sync = number == 0
        (loss_of(batch) / len(micro_batches)).backward()
    reducer.sync = True


wrong("2.6", "and not always 4").diff("""
Divides by the number of micro-batches that the text speaks of.
- (loss_of(batch) / len(micro_batches)).backward()
+ (loss_of(batch) / 4).backward()
""")


@wrong("2.6", "whether the list holds its micro-batches")
def accumulate(micro_batches, loss_of, reducer):
    """Empties its caller's list."""
    k = len(micro_batches)
    while micro_batches:
        batch = micro_batches.pop(0)
        reducer.sync = not micro_batches
        (loss_of(batch) / k).backward()


@wrong("2.6", "expected [2], got [0]")
def accumulate(micro_batches, loss_of, reducer):
    """Communicates nothing if there is one micro-batch."""
    k = len(micro_batches)
    for i, batch in enumerate(micro_batches):
        reducer.sync = i == k - 1 and i > 0
        (loss_of(batch) / k).backward()
    reducer.sync = True


@wrong("2.6", "whether the micro-batches are as they were")
def accumulate(micro_batches, loss_of, reducer):
    """Zeroes the batches on the way."""
    k = len(micro_batches)
    for i, batch in enumerate(micro_batches):
        reducer.sync = i == k - 1
        (loss_of(batch) / k).backward()
        batch.zero_()


@wrong("2.6", "the last is known by its place")
def accumulate(micro_batches, loss_of, reducer):
    """Knows the last one by what it is."""
    for batch in micro_batches:
        reducer.sync = batch is micro_batches[-1]
        (loss_of(batch) / len(micro_batches)).backward()
    reducer.sync = True


@wrong("2.6", "is divided by 1, not by 2")
def accumulate(micro_batches, loss_of, reducer):
    """Divides by `max(k, 2)`."""
    k = len(micro_batches)
    for i, m in enumerate(micro_batches):
        reducer.sync = i == k - 1
        (loss_of(m) / max(k, 2)).backward()


wrong("2.6", "one is in memory at a time").diff("""
Keeps the losses, and their graphs by `retain_graph`.
- for number, batch in enumerate(micro_batches, start=1):
+ losses = []
+ for number, batch in enumerate(micro_batches, start=1):

- (loss_of(batch) / len(micro_batches)).backward()
+ losses.append(loss_of(batch) / len(micro_batches))
+ losses[-1].backward(retain_graph=True)
""")
