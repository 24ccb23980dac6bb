"""Wrong answers to exercise 13.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("13.4", "exp of a large logit is inf")
def cross_entropy(logits, targets, first, group, g):
    """Subtracts no maximum."""
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = logits.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    zero = torch.zeros_like(wanted).detach()
    comm.all_reduce(zero, group, comm.MAX).wait()
    sums = g(torch.stack([logits.exp().sum(-1), wanted]))
    return (sums[0].log() - sums[1]).mean()


wrong("13.4", "each rank has subtracted its own maximum").diff("""
Subtracts its own maximum.
- comm.all_reduce(largest, group, comm.MAX).wait()
""")
wrong("13.4", "reduce them with `comm.MAX`").diff("""
Adds the maxima up.
- comm.all_reduce(largest, group, comm.MAX).wait()
+ comm.all_reduce(largest, group).wait()
""")
wrong("13.4", "column 0 was counted on ranks that do not have the target").diff("""
Counts column 0 where the target is another rank's.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0]
""")
wrong("13.4", "the nearest column was counted on ranks that do not have the target").diff("""
Clamps another rank's target to a column of its own, and counts it.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = shifted.gather(1, index.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
""")
wrong("13.4", "only the rank with the target contributes").diff("""
Counts 1 for another rank's target.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = torch.where(here, shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0], 1)
""")
wrong("13.4", "without `detach()` or `no_grad()`").diff("""
Detaches the sums, like the maximum.
- sums = g(torch.stack([shifted.exp().sum(-1), wanted]))
+ sums = g(torch.stack([shifted.exp().sum(-1), wanted]).detach())
""")
wrong("13.4", "read column 0 if the target is not on this rank").diff("""
Looks other ranks' targets up.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = shifted.gather(1, index[:, None])[:, 0] * here
""")
wrong("13.4", "this is the sum over the tokens; return their mean").diff("""
Adds up the tokens' losses.
- return (sums[0].log() - sums[1]).mean()
+ return (sums[0].log() - sums[1]).sum()
""")


@wrong("13.4", "logits must not be gathered")
def cross_entropy(logits, targets, first, group, g):
    """Gathers the logits."""
    size = torch.tensor(logits.shape[1])
    comm.all_reduce(size, group, comm.MAX).wait()
    padded = F.pad(logits, (0, int(size) - logits.shape[1])).detach()
    everything = padded.new_empty(group.size(), *padded.shape)
    comm.all_gather(everything.view(-1), padded.contiguous().view(-1), group).wait()
    return F.cross_entropy(logits, targets % logits.shape[1])


@wrong("13.4", "so it needs no gradient")
def cross_entropy(logits, targets, first, group, g):
    """Lets gradients flow through the maximum."""
    own = logits.amax(-1)
    largest = own.detach().clone()
    comm.all_reduce(largest, group, comm.MAX).wait()
    largest = torch.where(own == largest, own, largest)
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    sums = g(torch.stack([shifted.exp().sum(-1), wanted]))
    return (sums[0].log() - sums[1]).mean()


@wrong("13.4", "the target's logit is missing on ranks that do not have it")
def cross_entropy(logits, targets, first, group, g):
    """Adds up the exponentials alone."""
    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, group, comm.MAX).wait()
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    return (g(shifted.exp().sum(-1)).log() - wanted).mean()


@wrong("13.4", "the sum of exponentials is only this rank's")
def cross_entropy(logits, targets, first, group, g):
    """Adds up the target's logit alone."""
    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, group, comm.MAX).wait()
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    return (shifted.exp().sum(-1).log() - g(wanted)).mean()


wrong("13.4", "but not from the target's logit").diff("""
Takes the target's logit as it is.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = logits.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
""")
wrong("13.4", "the index of a target on this rank is relative to `first`").diff("""
Takes the target's place within its rank for granted.
- index = targets - first
- here = (index >= 0) & (index < logits.shape[1])
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ here = (targets >= 0) & (targets < logits.shape[1])
+ wanted = shifted.gather(1, torch.where(here, targets, 0)[:, None])[:, 0] * here
""")


@wrong("13.4", "the gradient is t times too large")
def cross_entropy(logits, targets, first, group, g):
    """Sums backward, too, by a function of its own."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return g(x)

        @staticmethod
        def backward(ctx, gradient):
            return g(gradient)

    largest = logits.detach().amax(-1)
    comm.all_reduce(largest, group, comm.MAX).wait()
    shifted = logits - largest[:, None]
    index = targets - first
    here = (index >= 0) & (index < logits.shape[1])
    wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
    sums = Both.apply(torch.stack([shifted.exp().sum(-1), wanted]))
    return (sums[0].log() - sums[1]).mean()


wrong("13.4", "`comm.all_reduce` only starts").diff("""
Does not wait for the maximum.
- comm.all_reduce(largest, group, comm.MAX).wait()
+ comm.all_reduce(largest, group, comm.MAX)
""")
wrong("13.4", "each token has a maximum of its own").diff("""
Takes one maximum for all tokens.
- largest = logits.detach().amax(-1)
+ largest = logits.detach().max().expand(len(targets)).clone()
""")
wrong("13.4", "right to 6 digits only").diff("""
Computes in float32.
- largest = logits.detach().amax(-1)
+ logits = logits.float()
+ largest = logits.detach().amax(-1)

- return (sums[0].log() - sums[1]).mean()
+ return (sums[0].log() - sums[1]).mean().double()
""")
wrong("13.4", "`first` is given").diff("""
Computes the first class.
- index = targets - first
+ index = targets - group.rank() * logits.shape[1]
""")
wrong("13.4", "one more was counted").diff("""
Counts the next rank's first class.
- here = (index >= 0) & (index < logits.shape[1])
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ here = (index >= 0) & (index <= logits.shape[1])
+ wanted = shifted.gather(1, index.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * here
""")
wrong("13.4", "log 0 is -inf").diff("""
Takes the logarithm of the target's probability.
- wanted = shifted.gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
+ wanted = shifted.exp().gather(1, torch.where(here, index, 0)[:, None])[:, 0] * here
- return (sums[0].log() - sums[1]).mean()
+ return -(sums[1] / sums[0]).log().mean()
""")
wrong("13.4", "the loss has the dtype of the logits").diff("""
Computes in float64.
- shifted = logits - largest[:, None]
+ shifted = (logits - largest[:, None]).double()
""")
