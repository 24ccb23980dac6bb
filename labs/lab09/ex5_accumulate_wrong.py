"""Wrong answers to exercise 9.5, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("9.5", "made no difference")
def accumulate(model, micro_batches, communicate):
    """Communicates every time."""
    for micro_batch in micro_batches:
        (model(*micro_batch) / len(micro_batches)).backward()


@wrong("9.5", "nothing is ever reduced")
def accumulate(model, micro_batches, communicate):
    """Runs the last micro-batch inside no_sync, too."""
    with nullcontext() if communicate else model.no_sync():
        for micro_batch in micro_batches:
            (model(*micro_batch) / len(micro_batches)).backward()


@wrong("9.5", "not the first")
def accumulate(model, micro_batches, communicate):
    """Reduces the first and keeps the rest."""
    for number, micro_batch in enumerate(micro_batches):
        with nullcontext() if communicate or number == 0 else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()


@wrong("9.5", "divide each micro-batch's loss")
def accumulate(model, micro_batches, communicate):
    """Sums in place of averaging."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            model(*micro_batch).backward()


wrong("9.5", "the caller decides when gradients begin anew").diff("""
Zeroes the gradients first.
  def accumulate(model, micro_batches, communicate):
+     model.zero_grad()
- reduces = communicate or number == len(micro_batches)
- with nullcontext() if reduces else model.no_sync():
+ with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
""")


@wrong("9.5", "run that inside `no_sync`, not the forward alone")
def accumulate(model, micro_batches, communicate):
    """Has the forward inside no_sync, and the backward outside."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            loss = model(*micro_batch) / len(micro_batches)
        loss.backward()


@wrong("9.5", "only the backward pass ran inside `no_sync`")
def accumulate(model, micro_batches, communicate):
    """Has the backward inside no_sync, and the forward outside."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        loss = model(*micro_batch) / len(micro_batches)
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            loss.backward()


@wrong("9.5", "of all micro-batches are alive together")
def accumulate(model, micro_batches, communicate):
    """One backward for all losses."""
    sum(model(*micro_batch) / len(micro_batches) for micro_batch in micro_batches).backward()


@wrong("9.5", "one forward for each")
def accumulate(model, micro_batches, communicate):
    """Makes one batch of them again."""
    model(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True))).backward()


wrong("9.5", "some of it ran inside `no_sync`").diff("""
Takes the switch the wrong way round.
- reduces = communicate or number == len(micro_batches)
- with nullcontext() if reduces else model.no_sync():
+ with nullcontext() if not communicate or number == len(micro_batches) else model.no_sync():
""")


@wrong("9.5", "its place tells")
def accumulate(model, micro_batches, communicate):
    """Tells the last one by its identity."""
    for micro_batch in micro_batches:
        with nullcontext() if communicate or micro_batch is micro_batches[-1] else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()


@wrong("9.5", "each counts 1/2")
def accumulate(model, micro_batches, communicate):
    """Divides by three, whatever their number."""
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            (model(*micro_batch) / 3).backward()


wrong("9.5", "is the model's business").diff("""
Knows micro-batches of two parts.
- for number, micro_batch in enumerate(micro_batches, start=1):
+ for number, (x, target) in enumerate(micro_batches, start=1):
- (model(*micro_batch) / len(micro_batches)).backward()
+ (model(x, target) / len(micro_batches)).backward()
""")


@wrong("9.5", "and remove nothing")
def accumulate(model, micro_batches, communicate):
    """Takes the last one off the list."""
    count = len(micro_batches)
    last = micro_batches.pop()
    for micro_batch in micro_batches:
        with nullcontext() if communicate else model.no_sync():
            (model(*micro_batch) / count).backward()
    (model(*last) / count).backward()


@wrong("9.5", "unless it is asked to retain them")
def accumulate(model, micro_batches, communicate):
    """Retains every graph, and the losses that hold them."""
    losses = []
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if communicate or number == len(micro_batches) else model.no_sync():
            losses.append(model(*micro_batch) / len(micro_batches))
            losses[-1].backward(retain_graph=True)


@wrong("9.5", "one micro-batch is the first and the last")
def accumulate(model, micro_batches, communicate):
    """Has at least one micro-batch inside no_sync."""
    inside = max(1, len(micro_batches) - 1)
    with nullcontext() if communicate else model.no_sync():
        for micro_batch in micro_batches[:inside]:
            (model(*micro_batch) / len(micro_batches)).backward()
    for micro_batch in micro_batches[inside:]:
        (model(*micro_batch) / len(micro_batches)).backward()
