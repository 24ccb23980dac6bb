"""Wrong answers to exercise 2.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


@wrong("2.4", "before wait() the buffer holds")
def finish_bucket(bucket, flat, handle):
    """Does not wait."""
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view(p.shape).clone()
    device.free(flat)


@wrong("2.4", "the means were never copied back")
def finish_bucket(bucket, flat, handle):
    """Waits and frees, and leaves the gradients as they were."""
    handle.wait()
    device.free(flat)


@wrong("2.4", "divided by N again")
def finish_bucket(bucket, flat, handle):
    """Averages twice: the all-reduce has taken the mean already."""
    handle.wait()
    flat /= handle.call.ranks
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view(p.shape).clone()
    device.free(flat)


@wrong("2.4", "buffers pile up")
def finish_bucket(bucket, flat, handle):
    """Never frees the buffer."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.copy_(part.view(p.shape))


@wrong("2.4", "write into the gradient that exists")
def finish_bucket(bucket, flat, handle):
    """Gives every gradient new memory while the old one still lives."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view_as(p).clone()
    device.free(flat)


@wrong("2.4", "a gradient that was None stays None")
def finish_bucket(bucket, flat, handle):
    """Passes over gradients that are None: this rank's parameter then stays behind the others'."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is not None:
            p.grad.copy_(part.view(p.shape))
    device.free(flat)


@wrong("2.4", "loses its memory when the buffer is freed")
def finish_bucket(bucket, flat, handle):
    """Lets the gradients be views of the buffer that it then frees."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view(p.shape)
    device.free(flat)


@wrong("2.4", "it must replace it")
def finish_bucket(bucket, flat, handle):
    """Accumulates the mean on top of the rank's own gradient."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        p.grad = part.view(p.shape).clone() if p.grad is None else p.grad + part.view(p.shape)
    device.free(flat)


@wrong("2.4", "attempting to assign a gradient")
def finish_bucket(bucket, flat, handle):
    """Makes float32 where there was None, whatever the dtype."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = torch.zeros(p.shape)
        p.grad.copy_(part.view(p.shape))
    device.free(flat)


@wrong("2.4", "the list is the caller's")
def finish_bucket(bucket, flat, handle):
    """Empties the bucket's list."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = part.clone().view(p.shape)
        else:
            p.grad.copy_(part.view(p.shape))
    bucket.clear()
    device.free(flat)


@wrong("2.4", "the optimizer moves parameters")
def finish_bucket(bucket, flat, handle):
    """Moves the parameters on the way."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = part.clone().view(p.shape)
        else:
            p.grad.copy_(part.view(p.shape))
        p.data -= 0.1 * p.grad
    device.free(flat)


@wrong("2.4", "gradient of a parameter that lies in memory channels last")
def finish_bucket(bucket, flat, handle):
    """Writes into what may be a copy of the gradient."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = part.clone().view(p.shape)
        else:
            p.grad.reshape(-1).copy_(part)
    device.free(flat)


@wrong("2.4", "have other memory now")
def finish_bucket(bucket, flat, handle):
    """Gives the gradient new memory."""
    handle.wait()
    for part, p in zip(flat.split([p.numel() for p in bucket]), bucket, strict=True):
        if p.grad is None:
            p.grad = part.clone().view(p.shape)
        else:
            p.grad.data = part.view_as(p).clone()
    device.free(flat)


wrong("2.4", "expected 56, got 156").diff("""
Copies the whole buffer, and lets new gradients be parts of that.
- handle.wait()
- for part, param in zip(flat.split([param.numel() for param in bucket]), bucket, strict=True):
+ handle.wait()
+ whole = flat.clone()
+ for part, param in zip(whole.split([param.numel() for param in bucket]), bucket, strict=True):

- param.grad = mean.clone()
+ param.grad = mean
""")
wrong("2.4", "expected 56, got 140").diff("""
Copies each part before it copies it into the gradient.
- mean = part.view(param.shape)
+ mean = part.clone().view(param.shape)

- param.grad = mean.clone()
+ param.grad = mean
""")
wrong("2.4", "len() of a 0-d tensor").diff("""
Takes the first dimension by `len`, which a scalar does not have.
- mean = part.view(param.shape)
+ mean = part.view(len(param), -1).view_as(param)
""")
