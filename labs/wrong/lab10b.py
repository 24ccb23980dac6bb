"""Wrong answers to lab 10b, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

# 10b.1

wrong("10b.1", "every rank takes part in every all-gather").diff("""
Only those gather who keep something.
  kept = {}
+ if keep is None:
+     return kept
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
""")
wrong("10b.1", "free a unit before the next one is gathered").diff("""
Gathers everything, keeps, frees everything.
- for flat, names in units:
+ for flat, _ in units:
-     if keep is not None:
-         for names_of_one, view in zip(names, flat.views, strict=True):
+ for flat, names in units:
+     for names_of_one, view in zip(names, flat.views, strict=True):
+         if keep is not None:
""")
wrong("10b.1", "stays unsharded next to its state dict").diff("""
Frees nothing.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
- device.free(flat.full)
""")
wrong("10b.1", "freed before it was kept").diff("""
Frees the unit, and looks at it then.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))

  device.free(flat.full)
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
+         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
""")
wrong("10b.1", "a plain module's state dict has all names of a tied weight").diff("""
Takes the first name of each parameter.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
+         kept[names_of_one[0]] = keep(view.detach())
""")
wrong("10b.1", "a tied parameter is kept once").diff("""
Keeps a copy for each name.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     for name in names_of_one if keep is not None else []:
+         kept[name] = keep(view.detach())
""")
wrong("10b.1", "until the handle's `wait()` the buffer holds anything").diff("""
Does not wait for the gather.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
+ comm.all_gather(flat.full.data, flat.shard.data, group)
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
""")
wrong("10b.1", "one all-gather per unit, whatever the rank keeps").diff("""
Gathers the unit's parameters one by one, by an object collective's cousin: an all-reduce of zeros.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
+ flat.full.data.zero_()
+ size = flat.shard.numel()
+ flat.full.data[group.rank() * size :][:size].copy_(flat.shard.data)
+ comm.all_reduce(flat.full.data, group).wait()
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     if keep is not None:
""")
wrong("10b.1", "a rank whose `keep` is None gets an empty dict").diff("""
Enters the names on ranks that keep nothing.
- if keep is not None:
-     for names_of_one, view in zip(names, flat.views, strict=True):
-         kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for names_of_one, view in zip(names, flat.views, strict=True):
+     kept.update(dict.fromkeys(names_of_one, keep(view.detach()) if keep else None))
""")
wrong("10b.1", "`group` need not be the world").diff("""
Gathers over the world, whatever the group is.
- comm.all_gather(flat.full.data, flat.shard.data, group).wait()
+ comm.all_gather(flat.full.data, flat.shard.data, comm.world()).wait()
""")
wrong("10b.1", "on ranks that keep nothing too").diff("""
Frees where it keeps, and nowhere else.
- device.free(flat.full)
+     device.free(flat.full)
""")
wrong("10b.1", "`set_grad_enabled` stays").diff("""
Switches gradients off, for ever.
  def whole_values(units, group, keep):
+     torch.set_grad_enabled(False)
""")
wrong("10b.1", "whatever its number").diff("""
Rank 0 keeps, whoever has a `keep`.
- if keep is not None:
+ if group.rank() == 0:
""")
wrong("10b.1", "rank 0, the result: expected {}").diff("""
Collects in a default argument, which goes on growing.
- def whole_values(units, group, keep):
-     kept = {}
+ def whole_values(units, group, keep, kept={}):
""")
wrong("10b.1", "and their dtype").diff("""
Casts to fp32 in a buffer of its own.
- kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ kept.update(dict.fromkeys(names_of_one, keep(view.detach().float())))
""")
wrong("10b.1", "under all names of a parameter, not a copy").diff("""
Copies what was kept for the second name.
- for names_of_one, view in zip(names, flat.views, strict=True):
-     kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ for view, (first, *others) in zip(flat.views, names, strict=False):
+     kept[first] = keep(view.detach())
+     for name in others:
+         kept[name] = kept[first].clone()
""")
wrong("10b.1", "missing (again.weight)").diff("""
Knows parameters of two names at most.
- kept.update(dict.fromkeys(names_of_one, keep(view.detach())))
+ kept.update(dict.fromkeys(names_of_one[:2], keep(view.detach())))
""")

# 10b.2

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

# 10b.3


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


# 10b.4


@wrong("10b.4", "Adam's `step` is on every rank already")
def whole_states(units, optimizer, group, keep):
    """Gathers the step, too."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            is_flat = value.shape == flat.shard.shape
            numel = flat.full.numel() if is_flat else group.size()
            buffer = device.empty(numel, value.dtype, "communication", flat.shard.device)
            comm.all_gather(buffer, value.reshape(-1).to(flat.shard.device), group).wait()
            wholes = flat.unflatten(buffer) if is_flat else [value] * len(names)
            if keep is not None:
                for names_of_one, whole in zip(names, wholes, strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "with a shared tensor, each adds for all")
def whole_states(units, optimizer, group, keep):
    """Hands the unit's own step to all its parameters."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "takes part in the same gathers")
def whole_states(units, optimizer, group, keep):
    """Leaves at once where nothing is kept."""
    kept = {}
    for flat, names in units if keep is not None else []:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "each buffer is given back as soon as its states are kept")
def whole_states(units, optimizer, group, keep):
    """Leaves the buffers to live on."""
    kept, buffers = {}, []
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            buffers.append(buffer)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
    units[0].flat.kept_alive = buffers
    return kept


@wrong("10b.4", "whole at once: one unit's, one key's, then give it back")
def whole_states(units, optimizer, group, keep):
    """Frees at the end of each unit only."""
    kept = {}
    for flat, names in units:
        buffers = []
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffers.append(device.empty(flat.full.numel(), value.dtype, "communication", value.device))
            comm.all_gather(buffers[-1], value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffers[-1]), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
        for buffer in buffers:
            device.free(buffer)
    return kept


@wrong("10b.4", "allocate the buffer with `device.empty")
def whole_states(units, optimizer, group, keep):
    """Gathers into a tensor that nobody counts."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = torch.empty(flat.full.numel(), dtype=value.dtype, device=value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
    return kept


@wrong("10b.4", "every key, the step too")
def whole_states(units, optimizer, group, keep):
    """Leaves the step out."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "a unit without state, as a frozen one, has no entries")
def whole_states(units, optimizer, group, keep):
    """An empty state for each frozen parameter."""
    kept = {}
    for flat, names in units:
        if keep is not None:
            kept |= {names_of_one[0]: {} for names_of_one in names}
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept[names_of_one[0]][key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept[names_of_one[0]][key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "`group` need not be the world")
def whole_states(units, optimizer, group, keep):
    """Gathers over the world, whatever the group is."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, comm.world()).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "which need not be float32")
def whole_states(units, optimizer, group, keep):
    """Takes all states for float32."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), torch.float32, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "`step` is not the only number")
def whole_states(units, optimizer, group, keep):
    """Tells what is flat by its key."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if key == "step":
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "and not the shard's shape: compare the shapes")
def whole_states(units, optimizer, group, keep):
    """Tells numbers by their size."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.numel() == 1:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "other optimizers have others")
def whole_states(units, optimizer, group, keep):
    """Knows the keys of Adam."""
    kept = {}
    for flat, names in units:
        states = optimizer.state.get(flat.shard, {})
        for key in [each for each in ("step", "exp_avg", "exp_avg_sq") if each in states]:
            value = states[key]
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "`optimizer.state` is a defaultdict")
def whole_states(units, optimizer, group, keep):
    """Asks for the state of a frozen shard, which makes it one."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state[flat.shard].items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "`keep` is for whole states")
def whole_states(units, optimizer, group, keep):
    """Shows numbers to `keep`."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = keep(value)
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


@wrong("10b.4", "wait before you read, then the next state")
def whole_states(units, optimizer, group, keep):
    """Does not wait for the gather."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for names_of_one in names if keep is not None else []:
                    kept.setdefault(names_of_one[0], {})[key] = value.clone()
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group)
            if keep is not None:
                for names_of_one, whole in zip(names, flat.unflatten(buffer), strict=True):
                    kept.setdefault(names_of_one[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


wrong("10b.4", "whose states are step, mu_product").diff("""
Takes for the shard's shape whatever has a dimension.
- if value.shape == flat.shard.shape:
+ if value.dim() > 0:
""")
wrong("10b.4", "[n] and not [1, n]").diff("""
Takes for the shard's shape whatever has as many elements or more.
- if value.shape == flat.shard.shape:
+ if value.dim() and value.numel() == flat.shard.numel():
- comm.all_gather(buffer, value, group).wait()
+ comm.all_gather(buffer, value.flatten(), group).wait()
""")
wrong("10b.4", "whatever its number").diff("""
Rank 0 keeps, whoever has a `keep`.
- if keep is not None:
+ if group.rank() == 0:
""")


@wrong("10b.4", "cannot be converted to Scalar")
def whole_states(units, optimizer, group, keep):
    """Takes the step for Python's number."""
    kept = {}
    for flat, names in units:
        for key, value in optimizer.state.get(flat.shard, {}).items():
            if value.shape != flat.shard.shape:
                for each in names if keep is not None else ():
                    kept.setdefault(each[0], {})[key] = torch.tensor(value.item())
                continue
            buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
            comm.all_gather(buffer, value, group).wait()
            for each, whole in zip(names, flat.unflatten(buffer), strict=True) if keep is not None else ():
                kept.setdefault(each[0], {})[key] = keep(whole)
            device.free(buffer)
    return kept


wrong("10b.4", "the buffer is of `value.dtype`").diff("""
In the dtype of the parameters.
- buffer = device.empty(flat.full.numel(), value.dtype, "communication", value.device)
- comm.all_gather(buffer, value, group).wait()
+ buffer = device.empty(flat.full.numel(), flat.shard.dtype, "communication", value.device)
+ comm.all_gather(buffer, value.to(flat.shard.dtype), group).wait()
""")
wrong("10b.4", "not for its gradient").diff("""
Passes over units without a gradient.
- for key, value in optimizer.state.get(flat.shard, {}).items():
+ for key, value in optimizer.state.get(flat.shard, {}).items() if flat.shard.grad is not None else ():
""")
wrong("10b.4", "in another order").diff("""
Takes the optimizer's parameters to be in the order of the units.
- for flat, names in units:
+ for (flat, names), shard in zip(units, optimizer.param_groups[0]["params"], strict=True):
- for key, value in optimizer.state.get(flat.shard, {}).items():
+ for key, value in optimizer.state.get(shard, {}).items():
""")
wrong("10b.4", "count of gain: expected").diff("""
Makes a float of what is not gathered.
- kept.setdefault(names_of_one[0], {})[key] = keep(whole) if buffer is not None else whole.clone()
+ kept.setdefault(names_of_one[0], {})[key] = keep(whole) if buffer is not None else whole.clone().float()
""")

# 10b.5

wrong("10b.5", "half a checkpoint has the name of a whole one").diff("""
Writes under the final name at once.
- part, whole = folder / f".{name}.part", folder / name
+ whole = folder / name
- disk.make_folder(part)
+ disk.make_folder(whole)
- disk.write(part / file, content)
- disk.sync(part / file)
+ disk.write(whole / file, content)
+ disk.sync(whole / file)
- disk.sync(part)
- disk.rename(part, whole)
+ disk.sync(whole)
""")
wrong("10b.5", "sync each file that was written").diff("""
Syncs folders only.
- disk.sync(part / file)
""")
wrong("10b.5", "a barrier before the rename").diff("""
Rank 0 renames when it has finished itself.
      disk.sync(part / file)
- barrier()
""")
wrong("10b.5", "before rank 0 has made the folder").diff("""
No barrier after the folder is made.
      disk.make_folder(part)
- barrier()
""")
wrong("10b.5", "sync the part before it is renamed").diff("""
The files' names in the part are never synced.
- disk.sync(part)
""")
wrong("10b.5", "it saves no names that are added afterwards").diff("""
Syncs the part while it is empty.
  disk.make_folder(part)
+ disk.sync(part)
- disk.sync(part)
""")
wrong("10b.5", "sync `folder`, after the rename").diff("""
The rename itself is never synced.
- disk.rename(part, whole)

  disk.sync(folder)
+ disk.rename(part, whole)
""")
wrong("10b.5", "hence the last barrier").diff("""
The others go on while rank 0 renames.
      disk.sync(folder)
- barrier()
""")
wrong("10b.5", "one rank gives the name").diff("""
Every rank renames.
- if rank == 0:
-     disk.sync(part)
-     disk.rename(part, whole)
-     disk.sync(folder)
+ disk.sync(part)
+ disk.rename(part, whole)
+ disk.sync(folder)
""")
wrong("10b.5", "a barrier is for all ranks").diff("""
A barrier that only rank 0 comes to.
      disk.sync(folder)
- barrier()
+     barrier()
""")
wrong("10b.5", "sync saves what has been written before it").diff("""
Makes and syncs the files, and then fills them.
      disk.make_folder(part)
  barrier()
+ for file in files:
+     disk.write(part / file, b"")
+     disk.sync(part / file)
- disk.sync(part / file)
""")
wrong("10b.5", "call no barrier after an error").diff("""
Comes to the barrier though a write has failed, so that nobody hangs.
- for file, content in files.items():
-     disk.write(part / file, content)
-     disk.sync(part / file)
- barrier()
+ try:
+     for file, content in files.items():
+         disk.write(part / file, content)
+         disk.sync(part / file)
+ finally:
+     barrier()
""")
wrong("10b.5", "do not swallow the error").diff("""
Goes on when the disk is full.
- disk.write(part / file, content)
- disk.sync(part / file)
+ try:
+     disk.write(part / file, content)
+     disk.sync(part / file)
+ except OSError:
+     pass
""")
wrong("10b.5", "the folder is that of another run").diff("""
Goes on in the part of a killed run.
- disk.make_folder(part)
+ try:
+     disk.make_folder(part)
+ except FileExistsError:
+     print("there is a part already")
""")
wrong("10b.5", "as many barriers on every rank").diff("""
A barrier for each file.
  disk.sync(part / file)
+ barrier()
""")
wrong("10b.5", "and remove nothing").diff("""
Takes files off the dict that it was given.
- for file, content in files.items():
+ while files:
+     file, content = files.popitem()
""")
wrong("10b.5", "got all but rank-0-b").diff("""
Writes no empty files.
- disk.write(part / file, content)
- disk.sync(part / file)
+ if content:
+     disk.write(part / file, content)
+     disk.sync(part / file)
""")
wrong("10b.5", "expected its bytes, got others").diff("""
Takes the bytes for a line of text.
- disk.write(part / file, content)
+ disk.write(part / file, content.strip())
""")
wrong("10b.5", "expected run/.step-7.5.part").diff("""
Takes what follows a dot in the name for the ending of a file.
- part, whole = folder / f".{name}.part", folder / name
+ part, whole = folder / f".{Path(name).stem}.part", folder / name
""")
wrong("10b.5", "the error goes up as it is").diff("""
Raises an error of its own.
- disk.make_folder(part)
+ try:
+     disk.make_folder(part)
+ except OSError as error:
+     raise RuntimeError("the disk is full") from error
""")

# 10b.6


@wrong("10b.6", "trained modules may lie further down")
def units_for(model, block):
    """Looks at the children of blocks only."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)
    for top in (model, *blocks):
        inner = [each for each in top.modules() if each in blocks and each is not top]
        if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
            for child in top.children():
                if {p.requires_grad for p in child.parameters()} == {True} and child not in blocks:
                    units.add(child)
    return units


@wrong("10b.6", "go no deeper than necessary")
def units_for(model, block):
    """Makes every trained module in a mixed unit a unit of its own."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)
    for top in (model, *blocks):
        inner = {each for each in top.modules() if each in blocks and each is not top}
        if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
            skipped = {each for module in inner for each in module.modules()}
            for module in set(top.modules()) - skipped - {top}:
                if {p.requires_grad for p in find_parameters(module, skip=inner)} == {True}:
                    units.add(module)
    return units


@wrong("10b.6", "a unit that does not mix needs no separation")
def units_for(model, block):
    """Separates trained modules wherever there are any."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)

    def separate(module):
        for child in module.children():
            inner = [each for each in child.modules() if each in blocks and each is not child]
            if child in blocks:
                continue
            if {p.requires_grad for p in find_parameters(child, skip=inner)} == {True}:
                units.add(child)
            else:
                separate(child)

    for top in (model, *blocks):
        separate(top)
    return units


wrong("10b.6", "one unit of frozen parameters too many").diff("""
Gives the frozen modules units of their own as well.
- if kinds(child) == {True}:
+ if len(kinds(child)) == 1:
""")
wrong("10b.6", "separate the trained ones").diff("""
Separates the frozen ones.
- if kinds(child) == {True}:
+ if kinds(child) == {False}:
""")


@wrong("10b.6", "what no block holds can mix as well")
def units_for(model, block):
    """Forgets the root."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)

    def separate(module):
        for child in module.children():
            if {p.requires_grad for p in child.parameters()} == {True}:
                units.add(child)
            else:
                separate(child)

    for top in blocks:
        if len({p.requires_grad for p in top.parameters()}) > 1:
            separate(top)
    return units


@wrong("10b.6", "each block is a unit, whatever is frozen in it")
def units_for(model, block):
    """Only the blocks that train are units."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = {each for each in blocks if any(p.requires_grad for p in each.parameters())}

    def separate(module):
        for child in module.children():
            if {p.requires_grad for p in child.parameters()} == {True}:
                units.add(child)
            else:
                separate(child)

    for top in blocks:
        if len({p.requires_grad for p in top.parameters()}) > 1:
            separate(top)
    return units


wrong("10b.6", "once its blocks are units").diff("""
Takes the list of trained blocks for a trained module.
- def kinds(module):
-     inner = [each for each in module.modules() if each in blocks and each is not module]
-     return {p.requires_grad for p in find_parameters(module, skip=inner)}

- if kinds(child) == {True}:
+ if {p.requires_grad for p in child.parameters()} == {True}:
- if len(kinds(top)) > 1:
+ inner = [each for each in top.modules() if each in blocks and each is not top]
+ if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1 or inner:
""")
wrong("10b.6", "only the parameters outside its blocks count").diff("""
Counts the blocks' parameters on the way down.
- def kinds(module):
-     inner = [each for each in module.modules() if each in blocks and each is not module]
-     return {p.requires_grad for p in find_parameters(module, skip=inner)}
- def separate(module):
+ def separate(module, inner):
- if kinds(child) == {True}:
+ found = {p.requires_grad for p in find_parameters(child)}
+ if found == {True}:
- else:
-     separate(child)
+ elif len(found) > 1:
+     separate(child, inner)
- if len(kinds(top)) > 1:
-     separate(top)
+ inner = blocks - {top}
+ if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
+     separate(top, inner)
""")
wrong("10b.6", "no block is found to mix").diff("""
Leaves out the block itself, too.
- def kinds(module):
-     inner = [each for each in module.modules() if each in blocks and each is not module]
-     return {p.requires_grad for p in find_parameters(module, skip=inner)}
- def separate(module):
+ def separate(module, inner):
- if kinds(child) == {True}:
+ found = {p.requires_grad for p in find_parameters(child, skip=inner)}
+ if found == {True}:
- else:
-     separate(child)
+ elif len(found) > 1:
+     separate(child, inner)
- if len(kinds(top)) > 1:
-     separate(top)
+ inner = blocks
+ if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
+     separate(top, inner)
""")


@wrong("10b.6", "a subclass of `block` is a block too")
def units_for(model, block):
    """Compares types."""
    blocks = {module for module in model.modules() if type(module) is block}
    units = set(blocks)

    def separate(module, inner):
        for child in module.children():
            if child not in blocks:
                found = {p.requires_grad for p in find_parameters(child, skip=inner)}
                if found == {True}:
                    units.add(child)
                elif len(found) > 1:
                    separate(child, inner)

    for top in (model, *blocks):
        inner = blocks - {top}
        if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
            separate(top, inner)
    return units


@wrong("10b.6", "the outermost module is wrapped anyway")
def units_for(model, block):
    """Names the model, too."""
    blocks = {module for module in model.modules() if isinstance(module, block)}
    units = set(blocks)

    def separate(module, inner):
        for child in module.children():
            if child not in blocks:
                found = {p.requires_grad for p in find_parameters(child, skip=inner)}
                if found == {True}:
                    units.add(child)
                elif len(found) > 1:
                    separate(child, inner)

    for top in (model, *blocks):
        inner = blocks - {top}
        if len({p.requires_grad for p in find_parameters(top, skip=inner)}) > 1:
            separate(top, inner)
    return units | {model}


wrong("10b.2", "large whole numbers lose").diff("""
Copies on the way through float32.
- return first, whole[first : first + size].clone()
+ return first, whole[first : first + size].clone().float().to(whole.dtype)
""")
wrong("10b.3", "large whole numbers lose").diff("""
Reads in double.
- out[low - first : high - first].copy_(piece.read()[low - piece.first : high - piece.first])
+ out[low - first : high - first].copy_(piece.read().double()[low - piece.first : high - piece.first])
""")
wrong("10b.6", "the parameters that it holds directly as well").diff("""
Asks the model's children, and not the model, whether its unit mixes.
- if len(kinds(top)) > 1:
+ if len(kinds(top) if top in blocks else set().union(*map(kinds, top.children()))) > 1:
""")
