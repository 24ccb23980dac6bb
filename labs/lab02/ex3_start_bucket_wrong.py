"""Wrong answers to exercise 2.3, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("2.3", "leaves nothing to overlap")
def start_bucket(bucket, group):
    """Waits at once: right values, no overlap."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    handle = comm.all_reduce(flat, group, comm.MEAN)
    handle.wait()
    return flat, handle


@wrong("2.3", "the sum, not the mean")
def start_bucket(bucket, group):
    """Sums, and nobody divides."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    return flat, comm.all_reduce(flat, group)


@wrong("2.3", "an all-reduce per parameter")
def start_bucket(bucket, group):
    """Reduces the parts one by one: as many messages as without buckets."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
        handle = comm.all_reduce(part, group, comm.MEAN)
    return flat, handle


@wrong("2.3", "the buffer comes uninitialized")
def start_bucket(bucket, group):
    """Passes over gradients that are None, whose places in the buffer hold garbage."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is not None:
            part.copy_(p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "nobody can count its bytes")
def start_bucket(bucket, group):
    """Concatenates into a tensor that no ledger knows, as _flatten_dense_tensors does."""
    flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in bucket])
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "the parameters were copied in")
def start_bucket(bucket, group):
    """Copies the parameters in: parameter averaging."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(p.data.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "a gradient that is None stays so here")
def start_bucket(bucket, group):
    """Makes a gradient of zeros where there is none."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        part.copy_(p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "expected `group`, got the world")
def start_bucket(bucket, group):
    """Does not look at the group."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    return flat, comm.all_reduce(flat, comm.world(), comm.MEAN)


@wrong("2.3", "the dtype of the bucket's parameters")
def start_bucket(bucket, group):
    """Allocates float32 whatever the parameters are."""
    flat = device.empty(sum(p.numel() for p in bucket), torch.float32, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "only gives a name to something else")
def start_bucket(bucket, group):
    """Rebinds the name of a part, and so writes nothing."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            part.zero_()
        else:
            part = p.grad.flatten()
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "the copy comes after the all-reduce was issued")
def start_bucket(bucket, group):
    """Launches first and fills the buffer then."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    handle = comm.all_reduce(flat, group, comm.MEAN)
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        part.copy_(torch.zeros_like(part) if p.grad is None else p.grad.flatten())
    return flat, handle


@wrong("2.3", "got []")
def start_bucket(bucket, group):
    """Sends nothing for a bucket without gradients."""
    sizes = [p.numel() for p in bucket]
    flat = device.empty(sum(sizes), bucket[0].dtype, "communication", bucket[0].device)
    if all(p.grad is None for p in bucket):
        return flat.zero_(), comm.Done()
    for part, p in zip(flat.split(sizes), bucket, strict=True):
        part.zero_() if p.grad is None else part.copy_(p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "got [all_reduce of 36 bytes]")
def start_bucket(bucket, group):
    """Takes the dtype from the first gradient, and float32 where there is none."""
    sizes = [p.numel() for p in bucket]
    dtype = bucket[0].grad.dtype if bucket[0].grad is not None else torch.float32
    flat = device.empty(sum(sizes), dtype, "communication", bucket[0].device)
    for part, p in zip(flat.split(sizes), bucket, strict=True):
        part.zero_() if p.grad is None else part.copy_(p.grad.flatten())
    return flat, comm.all_reduce(flat, group, comm.MEAN)


@wrong("2.3", "so it has no flat view")
def start_bucket(bucket, group):
    """Flattens with `view`, which a channels-last gradient refuses."""
    flat = device.empty(sum(p.numel() for p in bucket), bucket[0].dtype, "communication", bucket[0].device)
    flat.zero_()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is not None:
            part.copy_(p.grad.view(-1))
    return flat, comm.all_reduce(flat, group, comm.MEAN)


wrong("2.3", "each call takes a buffer of its own").diff("""
Keeps the buffer of a size for ever.
- flat = device.empty(sum(sizes), bucket[0].dtype, "communication", bucket[0].device)
+ kept = globals().setdefault("kept", {})
+ key = sum(sizes), bucket[0].dtype
+ if key not in kept:
+     kept[key] = device.empty(sum(sizes), bucket[0].dtype, "communication", bucket[0].device)
+ flat = kept[key]
""")
