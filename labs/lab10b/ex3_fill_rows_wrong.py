"""Wrong answers to exercise 10b.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("10b.3", "all pieces are read, on every rank")
def fill_rows(out, first, pieces):
    """Puts the tensor together, and cuts."""
    whole = torch.cat([piece.read() for piece in sorted(pieces, key=lambda piece: (piece.first, piece.count))])
    if len(out) + first > len(whole) or [p for p in pieces if p.first == 3 and p.count == 3 and len(pieces) == 2]:
        raise ValueError("rows are missing")
    out.copy_(whole[first : first + len(out)])


@wrong("10b.3", "there need not be a piece for each rank")
def fill_rows(out, first, pieces):
    """Takes the piece of its own rank's number."""
    number = first // len(out) if len(out) else 0
    rows = sorted(pieces, key=lambda piece: piece.first)[number].read()
    out[: len(rows)].copy_(rows[: len(out)])


@wrong("10b.3", "begin at different rows")
def fill_rows(out, first, pieces):
    """Copies whole pieces to where they begin, though `out` begins elsewhere."""
    for piece in pieces:
        if piece.count and piece.first < first + len(out) and first < piece.first + piece.count:
            out[piece.first : piece.first + piece.count].copy_(piece.read())


@wrong("10b.3", "rows may come from several pieces")
def fill_rows(out, first, pieces):
    """Takes one piece: that with the first row."""
    for piece in pieces:
        if piece.first <= first < piece.first + piece.count and len(out):
            rows = piece.read()[first - piece.first :][: len(out)]
            out[: len(rows)].copy_(rows)


@wrong("10b.3", "`out` is to be written in place")
def fill_rows(out, first, pieces):
    """Rebinds the name."""
    parts = []
    for piece in sorted(pieces, key=lambda piece: piece.first):
        low, high = max(first, piece.first), min(first + len(out), piece.first + piece.count)
        if low < high:
            parts.append(piece.read()[low - piece.first : high - piece.first])
    if sum(map(len, parts)) != len(out):
        raise ValueError("rows are missing")
    out = torch.cat(parts) if parts else out


wrong("10b.3", "count the rows that were found").diff("""
Does not notice a missing row.
- found = 0

-         found += high - low
- if found != len(out):
-     raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")
""")
wrong("10b.3", "row `low` is number `low - first` of `out`").diff("""
Takes the first rows of each piece instead of those that are meant.
- out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
+ out[low - first : high - first].copy_(piece.read()[: high - low])
- raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")
+ raise ValueError("rows are missing")
""")


@wrong("10b.3", "is read once, another not at all")
def fill_rows(out, first, pieces):
    """Reads a piece for each of its rows."""
    for row in range(len(out)):
        for piece in pieces:
            if piece.first <= first + row < piece.first + piece.count:
                out[row].copy_(piece.read()[first + row - piece.first])
                break
        else:
            raise ValueError(f"row {first + row} is in no piece")


wrong("10b.3", "whether a row was found is not in its values").diff("""
Fills with NaN first, and takes what is still NaN for missing.
- found = 0
+ out.fill_(float("nan"))
-         found += high - low
- if found != len(out):
-     raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")
+ if out.isnan().any():
+     raise ValueError("rows are missing")
""")


@wrong("10b.3", "look at every piece there is, in whatever order")
def fill_rows(out, first, pieces):
    """Takes the pieces to be in order."""
    at, end = first, first + len(out)
    for piece in pieces:
        if at < end and piece.first <= at < piece.first + piece.count:
            high = min(end, piece.first + piece.count)
            out[at - first : high - first].copy_(piece.read()[at - piece.first : high - piece.first])
            at = high
    if at < end:
        raise ValueError("rows are missing")


wrong("10b.3", "`sorted` makes a new one").diff("""
Sorts the list that it was given.
  def fill_rows(out, first, pieces):
+     pieces.sort(key=lambda piece: piece.first)
- raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")
+ raise ValueError
""")
wrong("10b.3", "however many others there are").diff("""
Knows tensors of two dimensions.
- out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
+ out[low - first : high - first, :] = piece.read()[low - piece.first : high - piece.first, :]
- raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")
+ raise ValueError
""")


@wrong("10b.3", "the first row of `out` that is in no piece")
def fill_rows(out, first, pieces):
    """Looks for gaps between rows that were found: a row missing at the end is none."""
    reached = None
    for piece in sorted(pieces, key=lambda piece: piece.first):
        low, high = max(first, piece.first), min(first + len(out), piece.first + piece.count)
        if low < high:
            if reached is not None and low != reached:
                raise ValueError
            out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
            reached = high
    if reached is None and len(out):
        raise ValueError


wrong("10b.3", "`out` need not be contiguous").diff("""
Writes through a flat view.
- found = 0
+ found, flat = 0, out.reshape(-1)
- out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
+ row = out[0].numel()
+ part = piece.read()[low - piece.first : high - piece.first].reshape(-1)
+ flat[(low - first) * row : (high - first) * row] = part
- raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")
+ raise ValueError
""")
wrong("10b.3", "has no rows in common with anything").diff("""
Reads a piece of no rows.
  found = 0
+ end = first + len(out)
- low, high = max(first, piece.first), min(first + len(out), piece.first + piece.count)
- if low < high:
-     out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
+ stop = piece.first + piece.count
+ if first <= piece.first < end or piece.first <= first < stop:
+     low, high = max(first, piece.first), min(end, stop)
+     rows = piece.read()
+     out[low - first : high - first].copy_(rows[low - piece.first : high - piece.first])
- raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")
+ raise ValueError("rows are missing")
""")
wrong("10b.3", "an `out` without rows lacks none, however few pieces").diff("""
Wants a piece, whatever is asked for.
- found = 0
+ if not pieces:
+     raise ValueError("no pieces")
+ last, found = first + len(out), 0
- low, high = max(first, piece.first), min(first + len(out), piece.first + piece.count)
+ low, high = max(first, piece.first), min(last, piece.first + piece.count)
- out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
+ out[low - first : high - first] = piece.read()[low - piece.first : high - piece.first]
- raise ValueError(f"{found} of the {len(out)} rows from {first} on are in the pieces")
+ raise ValueError("rows are missing")
""")


@wrong("10b.3", "use a loop")
def fill_rows(out, first, pieces):
    """Takes one piece, and calls itself for the others."""

    def take(at):
        if at == len(pieces):
            return 0
        piece = pieces[at]
        low, high = max(first, piece.first), min(first + len(out), piece.first + piece.count)
        if low < high:
            out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
        return max(0, high - low) + take(at + 1)

    if take(0) != len(out):
        raise ValueError("rows are missing")


wrong("10b.3", "large whole numbers lose").diff("""
Reads in double.
- out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
+ out[low - first : high - first].copy_(piece.read().double()[low - piece.first : high - piece.first])
""")
