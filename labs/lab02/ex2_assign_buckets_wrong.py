"""Wrong answers to exercise 2.2, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("2.2", "in order of registration")
def assign_buckets(params, cap_bytes):
    """Forward order, as in published answers to a well-known course: the first bucket is full last."""
    buckets, size = [], cap_bytes
    for param in params:
        if size >= cap_bytes or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "a bucket per parameter")
def assign_buckets(params, cap_bytes):
    """A bucket per parameter."""
    return [[param] for param in reversed(params)]


@wrong("2.2", "the last bucket is lost")
def assign_buckets(params, cap_bytes):
    """Appends a bucket only when it is full: the last, partial one never is."""
    buckets, current = [], []
    for param in reversed(params):
        if current and param.dtype != current[0].dtype:
            buckets.append(current)
            current = []
        current.append(param)
        if sum(p.numel() * p.element_size() for p in current) >= cap_bytes:
            buckets.append(current)
            current = []
    return buckets


@wrong("2.2", "the cap is in bytes")
def assign_buckets(params, cap_bytes):
    """Counts elements."""
    buckets, size = [], cap_bytes
    for param in reversed(params):
        if size >= cap_bytes or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel()
    return buckets


@wrong("2.2", "one buffer has one dtype")
def assign_buckets(params, cap_bytes):
    """Mixes dtypes in a bucket."""
    buckets, size = [], cap_bytes
    for param in reversed(params):
        if size >= cap_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "closed before the cap is reached")
def assign_buckets(params, cap_bytes):
    """Takes the cap for a limit that no bucket may exceed."""
    buckets, size = [], 0
    for param in reversed(params):
        new = param.numel() * param.element_size()
        if not buckets or size + new > cap_bytes or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += new
    return buckets


@wrong("2.2", "the cap itself is enough")
def assign_buckets(params, cap_bytes):
    """Closes a bucket beyond the cap only."""
    buckets, size = [[]], 0
    for param in reversed(params):
        if buckets[-1] and (size > cap_bytes or param.dtype != buckets[-1][0].dtype):
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "also where the dtype changes")
def assign_buckets(params, cap_bytes):
    """Goes on counting after a change of dtype."""
    buckets, size = [[]], 0
    for param in reversed(params):
        if buckets[-1] and size >= cap_bytes:
            buckets.append([])
            size = 0
        if buckets[-1] and param.dtype != buckets[-1][0].dtype:
            buckets.append([])
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "cut from the first parameter on")
def assign_buckets(params, cap_bytes):
    """Cuts in the order of registration and turns the result around."""
    buckets, size = [[]], 0
    for param in params:
        if buckets[-1] and (size >= cap_bytes or param.dtype != buckets[-1][0].dtype):
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return [bucket[::-1] for bucket in reversed(buckets)]


wrong("2.2", "ask its element_size()").diff("""
Takes every element for four bytes.
- buckets = []
- filling = {}
+ buckets, filling = [], {}
- bucket = filling[param.dtype]
- bucket.append(param)
- if sum(p.numel() * p.element_size() for p in bucket) >= cap_bytes:
+ filling[param.dtype].append(param)
+ if sum(p.numel() * 4 for p in filling[param.dtype]) >= cap_bytes:
""")


@wrong("2.2", "in `params` afterwards: expected [0, 1, 2, 3, 4, 5, 6], got []")
def assign_buckets(params, cap_bytes):
    """Empties its caller's list."""
    open_, closed = {}, []
    while params:
        p = params.pop()
        if p.dtype not in open_:
            open_[p.dtype] = []
            closed.append(open_[p.dtype])
        open_[p.dtype].append(p)
        if sum(q.numel() * q.element_size() for q in open_[p.dtype]) >= cap_bytes:
            del open_[p.dtype]
    return closed


@wrong("2.2", "got [6, 5, 4, 3, 2, 1, 0]")
def assign_buckets(params, cap_bytes):
    """Reverses its caller's list."""
    params.reverse()
    buckets = []
    size = 0
    for param in params:
        if not buckets or size >= cap_bytes or param.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(param)
        size += param.numel() * param.element_size()
    return buckets


@wrong("2.2", "whatever came in between")
def assign_buckets(params, cap_bytes):
    """Closes a bucket before another dtype, where torch leaves it open."""
    out, held = [[]], 0
    for p in reversed(params):
        if out[-1] and (held >= cap_bytes or out[-1][0].dtype != p.dtype):
            out.append([])
            held = 0
        out[-1].append(p)
        held += p.numel() * p.element_size()
    return out


@wrong("2.2", "not that in which they are full")
def assign_buckets(params, cap_bytes):
    """Has buckets in the order in which they close."""
    open_, out = {}, []
    for p in reversed(params):
        b = open_.setdefault(p.dtype, [])
        b.append(p)
        if sum(q.numel() * q.element_size() for q in b) >= cap_bytes:
            out.append(open_.pop(p.dtype))
    return out + list(open_.values())


@wrong("2.2", "each dtype counts its own bytes")
def assign_buckets(params, cap_bytes):
    """Counts all dtypes together."""
    open_, out, held = {}, [], 0
    for p in reversed(params):
        if p.dtype not in open_:
            open_[p.dtype] = []
            out.append(open_[p.dtype])
        open_[p.dtype].append(p)
        held += p.numel() * p.element_size()
        if held >= cap_bytes:
            open_.clear()
            held = 0
    return out


wrong("2.2", "its storage may hold others").diff("""
Counts the storage, of which a parameter may be a part.
- if sum(p.numel() * p.element_size() for p in bucket) >= cap_bytes:
+ if sum(p.untyped_storage().nbytes() for p in bucket) >= cap_bytes:
""")
wrong("2.2", "got [[6], [5, 4], [3, 2], [1], [0]]").diff("""
Counts rows times columns.
- if sum(p.numel() * p.element_size() for p in bucket) >= cap_bytes:
+ if sum(p.shape[0] * p.shape[-1] * p.element_size() for p in bucket) >= cap_bytes:
""")
