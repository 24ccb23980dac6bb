"""Right answers that are not the reference's: each must pass."""

from minifsdp.course.workshop.wrong import right


@right("9.7")
def accumulate_tokens(model, micro_batches, group):
    """Averages the counts over the ranks, which puts N into the divisor."""
    mean = torch.zeros(1, dtype=torch.float64, device=micro_batches[0][1].device)
    for _, targets in micro_batches:
        mean += (targets != IGNORED).sum()
    comm.all_reduce(mean, group, comm.MEAN).wait()
    for number, micro_batch in enumerate(micro_batches, start=1):
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            (model(*micro_batch).sum() / (mean.item() or 1)).backward()


@right("9.7")
def accumulate_tokens(model, micro_batches, group):
    """Takes the losses of the targets only, and gives their weight to the backward pass."""
    count = sum((targets != IGNORED).sum() for _, targets in micro_batches)
    comm.all_reduce(count, group).wait()
    weight = torch.tensor(group.size() / max(1, int(count)), dtype=torch.float64, device=count.device)
    *others, last = micro_batches
    with model.no_sync():
        for tokens, targets in others:
            model(tokens, targets)[targets != IGNORED].sum().backward(weight)
    tokens, targets = last
    model(tokens, targets)[targets != IGNORED].sum().backward(weight)
