#!/usr/bin/env bash
# torch.autograd.graph.register_multi_grad_hook(mode="any") on the parameters, after wrapping: a common way to act once
# when a backward pass begins to reach them.
# Expected: It is called once in each of two backward passes, as with DDP.
# Seen: With fully_shard and with FSDP1 and use_orig_params=True, it is never called, without a warning: autograd does not
#   see these parameters. It is the same with register_hook.
#   "calls in two backward passes: {'DDP': 2, 'fully_shard': 0, 'FSDP1': 0}, of register_hook on one
#   parameter: {'DDP': 2, 'fully_shard': 0, 'FSDP1': 0}"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cpu", (2,))
wrappers = {
    "DDP": DistributedDataParallel,
    "fully_shard": lambda model: fully_shard(model, mesh=mesh),
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True),
}
of_many, of_one = dict.fromkeys(wrappers, 0), dict.fromkeys(wrappers, 0)
for name, wrap in wrappers.items():
    model = wrap(torch.nn.Linear(4, 4))

    def count(counts, name=name):
        counts[name] += 1

    register_multi_grad_hook(list(model.parameters()), lambda _: count(of_many), mode="any")
    next(model.parameters()).register_hook(lambda _: count(of_one))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 0:
    print(f"calls in two backward passes: {of_many}, of register_hook on one parameter: {of_one}")
assert list(of_many.values()) == list(of_one.values()) == [2, 0, 0]
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
