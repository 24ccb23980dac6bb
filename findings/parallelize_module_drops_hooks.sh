#!/usr/bin/env bash
# Hooks of parameters (register_hook, register_post_accumulate_grad_hook) that are set before parallelize_module or
# fully_shard, here on four parameters.
# Expected: They are called in each backward pass, as without the function and as after DistributedDataParallel, or an error.
# Seen: Both functions replace the parameters and lose the hooks, without a warning: an optimizer step in such a hook
#   never runs. Hooks that are set after parallelize_module are called.
#   "register_hook: {'DDP': 4, 'parallelize_module': 0, 'fully_shard': 0, 'after parallelize_module': 4}"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cpu", (2,))


def parallelized(model):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def alone(model):
    return model


def calls(hook, before, after):
    model, seen = before(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))), []
    for parameter in model.parameters():
        getattr(parameter, hook)(lambda _: seen.append(1))
    after(model)(torch.ones(2, 4)).sum().backward()
    return len(seen)


for hook in ("register_hook", "register_post_accumulate_grad_hook"):
    found = {
        "DDP": calls(hook, alone, DistributedDataParallel),
        "parallelize_module": calls(hook, alone, parallelized),
        "fully_shard": calls(hook, alone, lambda model: fully_shard(model, mesh=mesh)),
        "after parallelize_module": calls(hook, parallelized, alone),
    }
    if dist.get_rank() == 0:
        print(f"{hook}: {found}")
    assert list(found.values()) == [4, 0, 0, 4]
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
