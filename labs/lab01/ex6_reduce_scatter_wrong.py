"""Wrong answers to exercise 1.6, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong

wrong("1.6", "this is chunk r + 1 of the sum").diff("""
Starts with chunk r instead of r - 1, and so ends on chunk r + 1: the textbook's ring, one off.
- chunks = full.view(ranks, output.numel())
- partial = chunks[(rank - 1) % ranks]
+ chunks = full.view(ranks, -1)
+ partial = chunks[rank]
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = torch.empty_like(output)
- partial = arriving.add_(chunks[(rank - 2 - step) % ranks])
+ partial = arriving.add_(chunks[(rank - 1 - step) % ranks])
""")


@wrong("1.6", "N steps instead of N - 1")
def reduce_scatter(output, full, group, exchange):
    """Takes one step too many: right values, and one chunk more on the wire."""
    rank, ranks = group.rank(), group.size()
    chunks = full.view(ranks, -1)
    partial = torch.zeros_like(output)
    for step in range(ranks):
        arriving = torch.empty_like(output)
        exchange(partial, arriving, group)
        partial = arriving.add_(chunks[(rank - 1 - step) % ranks])
    output.copy_(partial)


@wrong("1.6", "nothing is added to it")
def reduce_scatter(output, full, group, exchange):
    """Passes chunks on and forgets to add."""
    rank, ranks = group.rank(), group.size()
    partial = full.view(ranks, -1)[(rank - 1) % ranks]
    for _ in range(ranks - 1):
        arriving = torch.empty_like(output)
        exchange(partial, arriving, group)
        partial = arriving
    output.copy_(partial)


wrong("1.6", "two ranks' parts only").diff("""
Sends its own chunk in every step instead of the partial sum.
- chunks = full.view(ranks, output.numel())
- partial = chunks[(rank - 1) % ranks]
+ chunks = full.view(ranks, -1)
+ partial = chunks[rank].clone()
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
- exchange(partial, arriving, group)
+ arriving = torch.empty_like(output)
+ exchange(chunks[(rank - 1 - step) % ranks], arriving, group)
""")


@wrong("1.6", "it is only read")
def reduce_scatter(output, full, group, exchange):
    """Adds up in the input itself."""
    rank, ranks = group.rank(), group.size()
    chunks = full.view(ranks, -1)
    for step in range(ranks - 1):
        arriving = torch.empty_like(output)
        exchange(chunks[(rank - 1 - step) % ranks], arriving, group)
        chunks[(rank - 2 - step) % ranks] += arriving
    output.copy_(chunks[rank])


@wrong("1.6", "the whole tensor goes round")
def reduce_scatter(output, full, group, exchange):
    """Sends the whole tensor in every step: right values, N times the bytes."""
    rank, ranks = group.rank(), group.size()
    total, passing = full.clone(), full
    for _ in range(ranks - 1):
        arriving = torch.empty_like(full)
        exchange(passing, arriving, group)
        total += arriving
        passing = arriving
    output.copy_(total.view(ranks, -1)[rank])


@wrong("1.6", "before chunk r of `full` has been read")
def reduce_scatter(output, full, group, exchange):
    """Receives into the output from the first step on."""
    rank, ranks = group.rank(), group.size()
    chunks = full.view(ranks, -1)
    passing = chunks[(rank - 1) % ranks].clone()
    for step in range(ranks - 1):
        exchange(passing, output, group)
        passing = output + chunks[(rank - 2 - step) % ranks]
    output.copy_(passing)


wrong("1.6", "from the buffer that it receives into").diff("""
One buffer for all steps: it is sent while the next chunk arrives in it.
- chunks = full.view(ranks, output.numel())
+ chunks = full.view(ranks, -1)
  partial = chunks[(rank - 1) % ranks]
+ arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
""")
wrong("1.6", "`output` was never written").diff("""
Binds the name `output` to the result.
- chunks = full.view(ranks, output.numel())
+ chunks = full.view(ranks, -1)
- output.copy_(partial)
+ output = partial
""")
wrong("1.6", "so that its bytes are counted").diff("""
Takes its buffers from torch, where nobody counts them.
- chunks = full.view(ranks, output.numel())
+ chunks = full.view(ranks, -1)
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = torch.empty_like(output)
""")
wrong("1.6", "this code always takes float32").diff("""
Writes a dtype down: tensors of another one arrive as garbage.
- chunks = full.view(ranks, output.numel())
+ chunks = full.view(ranks, -1)
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = device.empty(output.numel(), torch.float32, "communication", full.device)
""")


@wrong("1.6", "`comm.world()` is about the world")
def reduce_scatter(output, full, group, exchange):
    """Exchanges in the world."""
    group = comm.world()
    r, n = group.rank(), group.size()
    chunks = full.view(n, output.numel())
    partial = chunks[(r - 1) % n]
    for s in range(n - 1):
        a = device.empty(output.numel(), full.dtype, "communication", full.device)
        exchange(partial, a, group)
        partial = a.add_(chunks[(r - 2 - s) % n])
    output.copy_(partial)


@wrong("1.6", "cannot access local variable")
def reduce_scatter(output, full, group, exchange):
    """Has no result where there is no step."""
    r, n = group.rank(), group.size()
    chunks = full.view(n, output.numel())
    partial = chunks[(r - 1) % n]
    for s in range(n - 1):
        a = device.empty(output.numel(), full.dtype, "communication", full.device)
        exchange(partial, a, group)
        a += chunks[(r - 2 - s) % n]
        partial = a
    output.copy_(a)


wrong("1.6", "a buffer as long as what is sent").diff("""
Takes buffers as long as the whole input.
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = device.empty(full.numel(), full.dtype, "communication", full.device)[: output.numel()]
""")
wrong("1.6", "got bfloat16 from device.empty as unsharded").diff("""
Hands its buffers out as unsharded parameters.
- arriving = device.empty(output.numel(), full.dtype, "communication", full.device)
+ arriving = device.empty(output.numel(), full.dtype, "unsharded", full.device)
""")
