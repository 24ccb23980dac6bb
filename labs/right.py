"""Right answers that are not the reference's: each must pass."""

from minifsdp.course.workshop.wrong import right


@right("0.3")
def adam_step(param, grad, state, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8):
    """Moves the second moment by `lerp_` too."""
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(param)
        state["exp_avg_sq"] = torch.zeros_like(param)
    grad = grad.to(param.dtype)
    state["step"] += 1
    t = state["step"].item()
    state["exp_avg"].lerp_(grad, 1 - beta1)
    state["exp_avg_sq"].lerp_(grad.square(), 1 - beta2)
    root = state["exp_avg_sq"].sqrt() / (1 - beta2**t) ** 0.5
    param.addcdiv_(state["exp_avg"], root + eps, value=-lr / (1 - beta1**t))


@right("10b.5")
def commit(disk, folder, name, files, rank, barrier):
    """Lets every rank sync the part after its own files, and the folder after the rename."""
    part, whole = folder / f".{name}.part", folder / name
    if rank == 0:
        disk.make_folder(part)
    barrier()
    for file, content in files.items():
        disk.write(part / file, content)
        disk.sync(part / file)
    disk.sync(part)
    barrier()
    if rank == 0:
        disk.rename(part, whole)
    barrier()
    disk.sync(folder)


@right("8.6")
def rate_limit(gather, free, limit):
    """Records the event just before the free, which queues nothing."""
    frees = deque()

    def limited_gather(unit):
        if unit.state is SHARDED and unit.freed_after_forward:
            while len(frees) >= limit:
                frees.popleft().synchronize()
        gather(unit)

    def limited_free(unit):
        if unit.state is not SHARDED and unit.freed_after_forward:
            frees.append(device.current_stream(unit.device).record_event())
        free(unit)

    return limited_gather, limited_free


@right("12.1")
def cut(whole, ranks, rank, dim=0):
    """Asks `chunk` itself."""
    if dim and whole.shape[dim] % ranks:
        raise ValueError
    parts = whole.chunk(ranks, dim)
    return parts[rank] if rank < len(parts) else whole.narrow(dim, whole.shape[dim], 0)


@right("12.3")
def copy_out(gathered, params, dims, sizes, ranks):
    """Concatenates, leaves the padding behind, and copies once."""
    for whole, dim, column in zip(params, dims, gathered.view(ranks, -1).split(sizes, 1), strict=False):
        shape = list(whole.shape)
        shape[dim] = -(-shape[dim] // ranks)
        whole.copy_(torch.cat([row.view(shape) for row in column], dim).narrow(dim, 0, whole.shape[dim]))


@right("12.4")
def chunk_cat(packed, gradients, dims, sizes):
    """Goes by torch's own kernel where dimension 0 is cut."""
    ranks = packed.shape[0]
    parts = [torch.stack(g.chunk(ranks, dim)).flatten(1) if dim else g for g, dim in zip(gradients, dims, strict=True)]
    parts += [packed.new_zeros(ranks, sizes[-1])] if sizes[-1] else []
    torch._chunk_cat([part.to(packed.dtype) for part in parts], 0, ranks, out=packed)


@right("12.5")
def hold():
    """Lets the stream wait for all before it frees any."""
    kept = []

    def keep(buffer):
        kept.append((buffer, device.current_stream(buffer.device).record_event()))

    def give_back(on):
        for _, read in kept:
            read.wait(device.current_stream(on))
        while kept:
            kept.pop()[0].untyped_storage().resize_(0)

    return keep, give_back
