"""Wrong answers to exercise 10b.4, each with words that its rejection must contain."""

from minifsdp.course.workshop.wrong import wrong


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
