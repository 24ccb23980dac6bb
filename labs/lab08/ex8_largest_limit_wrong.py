"""Wrong answers to exercise 8.8, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("8.8", "unless they are neighbours")
def largest_limit(budget, blocks, held):
    """Takes the k largest blocks, wherever they are."""
    heaviest = sorted(blocks, reverse=True)
    fits = [k for k in range(1, len(blocks) + 1) if max(held) + sum(heaviest[:k]) <= budget]
    if not fits:
        raise ValueError("not even one unit fits")
    return max(fits)


wrong("8.8", "belong to different moments").diff("""
Adds two maxima of different moments.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held) + max(sum(blocks[i : i + k]) for i in range(len(blocks) - k + 1)) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")
wrong("8.8", "next to block j, blocks j - 1").diff("""
Gathers ahead in the wrong direction.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held[j] + sum(blocks[j : j + k]) for j in range(len(blocks))) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")
wrong("8.8", "`held` has to fit as well").diff("""
Looks at the gathered units alone.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(sum(blocks[max(0, j + 1 - k) : j + 1]) for j in range(len(blocks))) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")


@wrong("8.8", "that is one more than fits")
def largest_limit(budget, blocks, held):
    """Returns the first k that does not fit."""
    peak = 0
    for k in range(1, len(blocks) + 1):
        peak = max(held[j] + sum(blocks[max(0, j + 1 - k) : j + 1]) for j in range(len(blocks)))
        if peak > budget:
            if k == 1:
                raise ValueError("not even one unit fits")
            return k
    return len(blocks)


wrong("8.8", "exactly as many bytes as the budget are within it").diff("""
Wants a byte to spare.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held[j] + sum(blocks[max(0, j + 1 - k) : j + 1]) for j in range(len(blocks))) < budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")
wrong("8.8", "raise ValueError if it does not").diff("""
Returns 0 where nothing fits.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held[j] + sum(blocks[max(0, j + 1 - k) : j + 1]) for j in range(len(blocks))) <= budget:
- if not fits:
-     raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
""")
wrong("8.8", "a slice that begins below 0").diff("""
Slices from before block 0.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if max(held[j] + sum(blocks[j - k + 1 : j + 1]) for j in range(len(blocks))) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError("not even one unit fits")
""")
wrong("8.8", "the heaviest of them has to fit, not the last").diff("""
Looks at the moment of the last block only.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
- if peak <= budget:
+ if held[-1] + sum(blocks[-k:]) <= budget:
- raise ValueError(f"{budget:,} bytes are not enough for one unit at a time")
+ raise ValueError
""")


@wrong("8.8", "use `reversed`, not `reverse`")
def largest_limit(budget, blocks, held):
    """Reverses the lists that it was given."""
    blocks.reverse()
    held.reverse()
    for k in range(len(blocks), 0, -1):
        if max(h + sum(blocks[j : j + k]) for j, h in enumerate(held)) <= budget:
            return k
    raise ValueError


wrong("8.8", "near block 0 fewer than k blocks are unsharded").diff("""
Looks at the moments with k blocks only.
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
+ peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(k - 1, len(blocks)))
""")
wrong("8.8", "Python's int is exact").diff("""
Computes with tensors of float32.
  def largest_limit(budget, blocks, held):
+     import torch
+     sizes, beside = torch.tensor(blocks, dtype=torch.float32), torch.tensor(held, dtype=torch.float32)
- peak = max(held[j] + sum(blocks[max(0, j - k + 1) : j + 1]) for j in range(len(blocks)))
+ peak = max(beside[j] + sizes[max(0, j - k + 1) : j + 1].sum() for j in range(len(blocks)))
""")
