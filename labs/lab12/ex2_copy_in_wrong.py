"""Wrong answers to exercise 12.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("12.2", "rank r packs into row r").diff("""
Packs into the first row.
- row = gathered.view(ranks, -1)[rank]
+ row = gathered.view(ranks, -1)[0]
""")


@wrong("12.2", "columns are as wide as the first rank's shard")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Packs one piece behind the other."""
    row = gathered.view(ranks, -1)[rank]
    start = 0
    for piece in pieces:
        row[start : start + piece.numel()] = piece.flatten()
        start += piece.numel()
    return row


@wrong("12.2", "an assignment to a name copies nothing")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Gives the columns other names."""
    row = gathered.view(ranks, -1)[rank]
    columns = list(row.split(sizes))
    for i, piece in enumerate(pieces):
        columns[i] = piece.flatten()
    return row


@wrong("12.2", "padding comes after the shard")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Aligns pieces at the end of their columns."""
    row = gathered.view(ranks, -1)[rank]
    for column, piece in zip(row.split(sizes), pieces, strict=False):
        column[column.numel() - piece.numel() :] = piece.flatten()
    return row


@wrong("12.2", "its input is a part of its output")
def copy_in(gathered, pieces, sizes, ranks, rank):
    """Returns a copy of the row."""
    row = gathered.view(ranks, -1)[rank]
    for column, piece in zip(row.split(sizes), pieces, strict=False):
        column[: piece.numel()] = piece.flatten()
    return row.clone()


wrong("12.2", "the gap is sent, too").diff("""
Leaves the gap out of what it returns.
- return row
+ return row[: row.numel() - sizes[-1]]
""")
wrong("12.2", "expected the row [S], got None").diff("""
Returns nothing.
- return row
+ return None
""")
wrong("12.2", "in row-major order to the beginning of its column").diff("""
Packs the pieces transposed.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].copy_(piece.movedim(0, -1).flatten())
""")
wrong("12.2", "the optimizer owns the shards: only read them").diff("""
Empties the pieces.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].view(piece.shape).copy_(piece)
+     piece.zero_()
""")
wrong("12.2", "passed through a narrower dtype").diff("""
Casts to bfloat16 always.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].view(piece.shape).copy_(piece.bfloat16())
""")
wrong("12.2", "expected the row [S], got a tensor").diff("""
Returns the row as a matrix.
- return row
+ return row[None]
""")
wrong("12.2", "all passed through the first one's").diff("""
Casts all shards to the first one's dtype.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].view(piece.shape).copy_(piece.to(pieces[0].dtype))
""")
wrong("12.2", "take nothing away").diff("""
Takes the shards out of the caller's list.
- for column, piece in zip(row.split(sizes), pieces, strict=False):
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+ for column in row.split(sizes)[:-1]:
+     piece = pieces.pop(0)
+     column[: piece.numel()].view(piece.shape).copy_(piece)
""")
wrong("12.2", "2 ranks, float64): expected a tensor [9] float64").diff("""
Casts to float32 on the way.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     column[: piece.numel()].view(piece.shape).copy_(piece.float())
""")
wrong("12.2", "infinities and NaNs are copied as they are").diff("""
Takes float16 for bfloat16.
-     column[: piece.numel()].view(piece.shape).copy_(piece)
+     piece = piece.half() if piece.dtype == torch.bfloat16 else piece
+     column[: piece.numel()].view(piece.shape).copy_(piece)
""")
