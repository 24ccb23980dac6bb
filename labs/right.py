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
