"""Wrong answers to exercise 15.7, each with words that its rejection must contain.

Several are bugs of published trainers.
"""

from minifsdp.course.workshop.wrong import wrong

wrong("15.7", "gives all ranks the same weight").diff("""
Divides by the number of this rank's tokens (pytorch/torchtitan#2206 removes it).
- comm.all_reduce(tokens, group).wait()

- return [each * group.size() / tokens.clamp(min=1) for each in sums]
+ return [each / tokens.clamp(min=1) for each in sums]
""")


@wrong("15.7", "each micro-batch is divided by its own number of tokens")
def token_losses(logits, targets, group):
    """Averages each micro-batch, and then the micro-batches (meta-pytorch/torchtune#1875 removes it)."""
    losses = []
    for rows, wanted in zip(logits, targets, strict=True):
        count = (wanted != IGNORED).sum().clamp(min=1)
        total = F.cross_entropy(rows.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
        losses.append(total / count / len(logits))
    return losses


@wrong("15.7", "the mean over no tokens is 0 / 0")
def token_losses(logits, targets, group):
    """Weighs means by their numbers of tokens, but the mean of none is not a number."""
    tokens = torch.stack([(each != IGNORED).sum() for each in targets]).sum()
    comm.all_reduce(tokens, group).wait()
    losses = []
    for rows, wanted in zip(logits, targets, strict=True):
        mean = F.cross_entropy(rows.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
        losses.append(mean * (wanted != IGNORED).sum() * group.size() / tokens.clamp(min=1))
    return losses


wrong("15.7", "these are m means").diff("""
Takes the mean of each micro-batch, and forgets that their gradients add up.
- return [each * group.size() / tokens.clamp(min=1) for each in sums]
+ return [each / (wanted != IGNORED).sum().clamp(min=1) for each, wanted in zip(sums, targets, strict=True)]
""")
wrong("15.7", "tokens without a target are counted").diff("""
Counts padding.
- tokens = torch.stack([(each != IGNORED).sum() for each in targets]).sum()
+ tokens = torch.tensor(sum(each.numel() for each in targets))
""")
wrong("15.7", "multiply by N").diff("""
Divides by the number of all tokens, and lets the average over the ranks divide again.
- return [each * group.size() / tokens.clamp(min=1) for each in sums]
+ return [each / tokens.clamp(min=1) for each in sums]
""")


@wrong("15.7", "micro-batches also differ in size")
def token_losses(logits, targets, group):
    """Corrects for the ranks and not for the micro-batches, with a message for each."""
    losses = []
    for rows, wanted in zip(logits, targets, strict=True):
        tokens = (wanted != IGNORED).sum()
        comm.all_reduce(tokens, group).wait()
        total = F.cross_entropy(rows.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
        losses.append(total * group.size() / tokens.clamp(min=1) / len(logits))
    return losses


wrong("15.7", "N / T is all").diff("""
Also divides by the number of micro-batches.
- return [each * group.size() / tokens.clamp(min=1) for each in sums]
+ return [each * group.size() / tokens.clamp(min=1) / len(sums) for each in sums]
""")
wrong("15.7", "no factor m is missing").diff("""
Multiplies by the number of micro-batches, as if they were averaged.
- return [each * group.size() / tokens.clamp(min=1) for each in sums]
+ return [each * group.size() * len(sums) / tokens.clamp(min=1) for each in sums]
""")
wrong("15.7", "is about the world").diff("""
Takes the number of all ranks of the job.
- return [each * group.size() / tokens.clamp(min=1) for each in sums]
+ return [each * comm.world().size() / tokens.clamp(min=1) for each in sums]
""")
wrong("15.7", "and send one number").diff("""
Counts each micro-batch in a message of its own.
- tokens = torch.stack([(each != IGNORED).sum() for each in targets]).sum()
- comm.all_reduce(tokens, group).wait()
+ tokens = torch.zeros((), dtype=torch.int64)
+ for each in targets:
+     count = (each != IGNORED).sum()
+     comm.all_reduce(count, group).wait()
+     tokens = tokens + count
""")
wrong("15.7", "a loss has no graph").diff("""
Detaches the logits.
-     F.cross_entropy(rows.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
+     F.cross_entropy(rows.detach().flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
""")
wrong("15.7", "may lie between 0 and 1").diff("""
Averages the number of targets, and clamps the mean.
- tokens = torch.stack([(each != IGNORED).sum() for each in targets]).sum()
- comm.all_reduce(tokens, group).wait()
+ tokens = torch.stack([(each != IGNORED).sum() for each in targets]).sum().float()
+ comm.all_reduce(tokens, group, comm.MEAN).wait()

- return [each * group.size() / tokens.clamp(min=1) for each in sums]
+ return [each / tokens.clamp(min=1) for each in sums]
""")
wrong("15.7", "needs a zero with a graph").diff("""
Makes a zero of its own for a micro-batch without targets.
- return [each * group.size() / tokens.clamp(min=1) for each in sums]
+ zero = torch.zeros((), dtype=sums[0].dtype, device=sums[0].device)
+ found = [each * group.size() / tokens.clamp(min=1) for each in sums]
+ return [each if (wanted != IGNORED).any() else zero for each, wanted in zip(found, targets)]
""")
