"""Wrong answers to exercise 10b.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("10b.2", "the remaining rows belong to no rank").diff("""
Rounds down.
- size = -(-len(whole) // ranks)
- first = min(rank * size, len(whole))
- return first, whole[first : first + size].clone()
+ size = len(whole) // ranks
+ return rank * size, whole[rank * size : (rank + 1) * size].clone()
""")
wrong("10b.2", "all remaining rows went to the last rank").diff("""
Rounds down, and the last rank takes the rest.
- size = -(-len(whole) // ranks)
- first = min(rank * size, len(whole))
- return first, whole[first : first + size].clone()
+ size = len(whole) // ranks
+ end = len(whole) if rank == ranks - 1 else (rank + 1) * size
+ return rank * size, whole[rank * size : end].clone()
""")
wrong("10b.2", "this is as even as possible").diff("""
Uses tensor_split.
- size = -(-len(whole) // ranks)
- first = min(rank * size, len(whole))
- return first, whole[first : first + size].clone()
+ parts = torch.tensor_split(whole, ranks)
+ return sum(len(part) for part in parts[:rank]), parts[rank].clone()
""")
wrong("10b.2", "`chunk` makes fewer than N pieces").diff("""
Uses chunk, which has the right sizes and too few pieces.
- size = -(-len(whole) // ranks)
- first = min(rank * size, len(whole))
- return first, whole[first : first + size].clone()
+ parts = whole.chunk(ranks)
+ return sum(len(part) for part in parts[:rank]), parts[rank].clone()
""")
wrong("10b.2", "keeps the whole tensor's memory").diff("""
A slice, without a copy.
- return first, whole[first : first + size].clone()
+ return first, whole[first : first + size].detach()
""")
wrong("10b.2", "a rank without rows begins at the end, not beyond it").diff("""
First rows beyond the end.
- first = min(rank * size, len(whole))
- return first, whole[first : first + size].clone()
+ return rank * size, whole[rank * size : rank * size + size].clone()
""")
wrong("10b.2", "a tensor of no dimension cannot be cut").diff("""
Forgets numbers.
- if whole.dim() == 0:
-     return 0, whole.clone()
""")
wrong("10b.2", "whole rows, in the tensor's other dimensions").diff("""
Flattens the rows: right elements, another shape.
- return first, whole[first : first + size].clone()
+ rows = whole[first : first + size].clone()
+ return first, rows.reshape(len(rows), -1) if whole.dim() == 1 else rows.flip(1)
""")
wrong("10b.2", "keeps each tensor's dtype").diff("""
Converts to float32.
- return first, whole[first : first + size].clone()
+ return first, whole[first : first + size].clone().float()
""")
wrong("10b.2", "one element is not a number").diff("""
Takes one element for a number.
- if whole.dim() == 0:
+ if whole.numel() == 1:
- size = -(-len(whole) // ranks)
+ size = -(-len(whole) // ranks) if whole.dim() else 0
""")
wrong("10b.2", "are not next to each other in memory").diff("""
Takes the tensor to be contiguous.
- return first, whole[first : first + size].clone()
+ row = whole[:1].numel() if len(whole) else 0
+ n = max(0, min(size, len(whole) - first))
+ part = torch.as_strided(whole, (n * row,), (1,), whole.storage_offset() + first * row).clone()
+ return first, part.view(n, *whole.shape[1:])
""")
wrong("10b.2", "a number keeps its dtype").diff("""
Makes a new number of float32.
  def my_rows(whole, rank, ranks):
+     import torch
- return 0, whole.clone()
+ return 0, torch.tensor(float(whole))
""")
wrong("10b.2", "shape [7, 2, 3] on 2 ranks").diff("""
Flattens what has three dimensions.
- return first, whole[first : first + size].clone()
+ return first, whole[first : first + size].reshape(-1, *whole.shape[-1:] * (whole.dim() > 1)).clone()
""")
wrong("10b.2", "large whole numbers lose").diff("""
Copies on the way through float32.
- return first, whole[first : first + size].clone()
+ return first, whole[first : first + size].clone().float().to(whole.dtype)
""")
