"""Wrong answers to exercise 15.8, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("15.8", "bring both to one maximum before you add").diff("""
Adds numerators and denominators that have different maxima.
-     a, b = (old[1] - highest).exp(), (new[1] - highest).exp()
+     a, b = 1, 1
""")
wrong("15.8", "this adds up the blocks' attentions").diff("""
Adds up finished blocks.
-     highest = torch.maximum(old[1], new[1])
-     a, b = (old[1] - highest).exp(), (new[1] - highest).exp()
-     return a * old[0] + b * new[0], highest, a * old[2] + b * new[2]
+     return old[0] / old[2] + new[0] / new[2], new[1], torch.ones_like(new[2])
""")
wrong("15.8", "and not to 0").diff("""
Undoes the blocks' maxima.
-     highest = torch.maximum(old[1], new[1])
-     a, b = (old[1] - highest).exp(), (new[1] - highest).exp()
-     return a * old[0] + b * new[0], highest, a * old[2] + b * new[2]
+     a, b = old[1].exp(), new[1].exp()
+     zero = torch.zeros_like(new[1])
+     return a * old[0] + b * new[0], zero, a * old[2] + b * new[2]
""")
wrong("15.8", "a block of keys that all come after the queries is masked").diff("""
Computes masked blocks, with no weight.
-             if key <= query:
-                 sums[i] = combine(sums[i], block(queries[i], keys[j], values[j], key == query))
+             new = block(queries[i], keys[j], values[j], key == query)
+             if key <= query:
+                 sums[i] = combine(sums[i], new)
""")
wrong("15.8", "the causal mask is missing").diff("""
Attends to everything.
-             if key <= query:
-                 sums[i] = combine(sums[i], block(queries[i], keys[j], values[j], key == query))
+             sums[i] = combine(sums[i], block(queries[i], keys[j], values[j], False))
""")
wrong("15.8", "is True if the chunk of keys is the chunk of queries").diff("""
Masks whenever the keys are this rank's own.
-                 sums[i] = combine(sums[i], block(queries[i], keys[j], values[j], key == query))
+                 sums[i] = combine(sums[i], block(queries[i], keys[j], values[j], hop == 0))
""")
wrong("15.8", "were computed").diff("""
Compares ranks instead of chunks, which does for a contiguous cut.
-             if key <= query:
+             if (rank - hop) % ranks <= rank:
""")
wrong("15.8", "that it has c - 1 times").diff("""
Passes the keys on once more than necessary.
-     if hop < ranks - 1:
-         handles = [comm.send(kv, (rank + 1) % ranks, group), comm.recv(arriving, (rank - 1) % ranks, group)]
+     handles = [comm.send(kv, (rank + 1) % ranks, group), comm.recv(arriving, (rank - 1) % ranks, group)]
""")


@wrong("15.8", "a gather holds the keys and values of all ranks at once")
def ring_attention(q, k, v, chunks, block, group):
    """Gathers all keys and values first."""
    rank, ranks = group.rank(), group.size()
    mine = chunks[rank]
    kv = torch.stack([k, v])
    every = kv.new_empty(ranks, *kv.shape)
    comm.all_gather(every.view(-1), kv.view(-1), group).wait()
    done = []
    for query, of_query in zip(q.chunk(len(mine), 1), mine, strict=True):
        sums = None
        for owner in range(ranks):
            keys, values = (each.chunk(len(mine), 1) for each in every[owner])
            for j, key in enumerate(chunks[owner]):
                if key <= of_query:
                    new = block(query, keys[j], values[j], key == of_query)
                    if sums is not None:
                        highest = torch.maximum(sums[1], new[1])
                        a, b = (sums[1] - highest).exp(), (new[1] - highest).exp()
                        new = a * sums[0] + b * new[0], highest, a * sums[2] + b * new[2]
                    sums = new
        done.append(sums[0] / sums[2])
    return torch.cat(done, 1)


wrong("15.8", "it was changed or freed in between").diff("""
Receives into the tensor that it is sending.
-     arriving, handles = torch.empty_like(kv), []
+     arriving, handles = kv, []
""")
wrong("15.8", "not to the newest one").diff("""
Rescales to the newest maximum, which may be the smaller one.
-     highest = torch.maximum(old[1], new[1])
+     highest = new[1]
""")
wrong("15.8", "are not yet divided by the sums of weights").diff("""
Forgets the final division.
- return torch.cat([out / total for each in sums if each is not None for out, _, total in [each]], 1)
+ return torch.cat([out for each in sums if each is not None for out, _, total in [each]], 1)
""")
wrong("15.8", "the values are rescaled and the sums of weights are not").diff("""
Rescales the values only.
-     return a * old[0] + b * new[0], highest, a * old[2] + b * new[2]
+     return a * old[0] + b * new[0], highest, old[2] + new[2]
""")
wrong("15.8", "on the side from which they come").diff("""
Takes the keys for those of the next ranks.
-             for j, key in enumerate(chunks[(rank - hop) % ranks]):
+             for j, key in enumerate(chunks[(rank + hop) % ranks]):
""")
wrong("15.8", "and not on the side to which they go").diff("""
Sends backwards, and takes the keys for those of the ranks before.
-         handles = [comm.send(kv, (rank + 1) % ranks, group), comm.recv(arriving, (rank - 1) % ranks, group)]
+         handles = [comm.send(kv, (rank - 1) % ranks, group), comm.recv(arriving, (rank + 1) % ranks, group)]
""")
wrong("15.8", "start `recv` before you wait for `send`").diff("""
Waits for its send, which nobody receives.
-         handles = [comm.send(kv, (rank + 1) % ranks, group), comm.recv(arriving, (rank - 1) % ranks, group)]
+         comm.send(kv, (rank + 1) % ranks, group).wait()
+         comm.recv(arriving, (rank - 1) % ranks, group).wait()
""")
