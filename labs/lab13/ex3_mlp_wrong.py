"""Wrong answers to exercise 13.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("13.3", "every rank added the second bias before the sum").diff("""
Gives the second product its bias.
- return g(F.linear(hidden, down)) + down_bias
+ return g(F.linear(hidden, down, down_bias))
""")
wrong("13.3", "this is only this rank's partial sum of the output").diff("""
Forgets g.
- return g(F.linear(hidden, down)) + down_bias
+ return F.linear(hidden, down) + down_bias
""")
wrong("13.3", "apply f to x before the first matmul").diff("""
Forgets f.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.gelu(F.linear(x, up, up_bias))
""")
wrong("13.3", "the second bias is missing").diff("""
Forgets the second bias.
- return g(F.linear(hidden, down)) + down_bias
+ return g(F.linear(hidden, down))
""")
wrong("13.3", "adds its shard of it to its shard of the hidden features").diff("""
Forgets the first bias.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.gelu(F.linear(f(x), up))
""")


@wrong("13.3", "adding 1/t of the bias on each rank gives the right sum")
def mlp(x, up, up_bias, down, down_bias, f, g):
    """Adds a part of the bias on every rank."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    return g(F.linear(F.gelu(F.linear(f(x), up, up_bias)), down, down_bias / ranks))


@wrong("13.3", "a rank that does not add the bias has no gradient for it")
def mlp(x, up, up_bias, down, down_bias, f, g):
    """Lets the first rank alone add the bias."""
    import torch.distributed as dist

    bias = down_bias if dist.get_rank() == 0 else None
    return g(F.linear(F.gelu(F.linear(f(x), up, up_bias)), down, bias))


wrong("13.3", "every rank already has the complete gradient of the bias").diff("""
Sums the bias's gradient.
- return g(F.linear(hidden, down)) + down_bias
+ return g(F.linear(hidden, down)) + f(down_bias)
""")
wrong("13.3", "the gelu is missing").diff("""
Forgets the gelu.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.linear(f(x), up, up_bias)
""")
wrong("13.3", "the hidden features stay on their rank").diff("""
Sums the hidden features.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ linear = F.linear(f(x), up, up_bias)
+ g(linear)
+ hidden = F.gelu(linear)
""")
wrong("13.3", "f or g was applied once too often").diff("""
Lets x in through f twice.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.gelu(F.linear(f(f(x)), up, up_bias))
""")
wrong("13.3", "with one or more dimensions").diff("""
Has exactly one batch and one sequence.
- hidden = F.gelu(F.linear(f(x), up, up_bias))
+ hidden = F.gelu(torch.einsum("bsh,ih->bsi", f(x), up) + up_bias)
""")
wrong("13.3", "give back those that you have flattened").diff("""
Returns rows.
- return g(F.linear(hidden, down)) + down_bias
+ return (g(F.linear(hidden, down)) + down_bias).reshape(-1, x.shape[-1])
""")
