"""Wrong answers to exercise 3.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("3.2", "every rank updates everything").diff("""
Gives every rank all shards.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shard) for shards in buckets for shard in shards], **defaults)
""")
wrong("3.2", "this is the shard of rank").diff("""
Takes the next rank's shards.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[(rank + 1) % len(shards)]) for shards in buckets], **defaults)
""")
wrong("3.2", "was given copies of the shards").diff("""
Gives the optimizer copies.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank].clone()) for shards in buckets], **defaults)
""")
wrong("3.2", "not of the first alone").diff("""
Shards only the first bucket.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(buckets[0][rank])], **defaults)
""")
wrong("3.2", "did not reach the optimizer").diff("""
Drops the learning rate.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets])
""")
wrong("3.2", "not one bucket's shards").diff("""
Takes the bucket with the rank's number instead of the shards with it.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shard) for shard in buckets[rank % len(buckets)]], **defaults)
""")
wrong("3.2", "is a plain tensor").diff("""
Gives the optimizer plain tensors.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([shards[rank] for shards in buckets], **defaults)
""")
wrong("3.2", "`optimizer_class` is an argument").diff("""
Makes an Adam, whatever is asked for.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return torch.optim.Adam([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
""")
wrong("3.2", "all of `**defaults` go to").diff("""
Hands on the learning rate alone.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], lr=defaults["lr"])
""")
wrong("3.2", "one parameter group with all shards").diff("""
Makes a parameter group per bucket.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([{"params": [nn.Parameter(shards[rank])]} for shards in buckets], **defaults)
""")
wrong("3.2", "the lists are the caller's").diff("""
Writes its Parameters into the caller's lists.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ for shards in buckets:
+     shards[rank] = nn.Parameter(shards[rank])
+ return optimizer_class([shards[rank] for shards in buckets], **defaults)
""")
wrong("3.2", "of however many buckets").diff("""
Knows that there are two buckets.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets[:2]], **defaults)
""")
wrong("3.2", "a shard whose elements are all zero").diff("""
Leaves shards out that hold only zeros, taking them for padding.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(b[rank]) for b in buckets if b[rank].any()], **defaults)
""")
wrong("3.2", "what changes the dtype makes a copy").diff("""
Asks for float32, which float32 shards are already.
- return optimizer_class([nn.Parameter(shards[rank]) for shards in buckets], **defaults)
+ return optimizer_class([nn.Parameter(shards[rank].float()) for shards in buckets], **defaults)
""")
