#!/usr/bin/env bash
# p.data = ... of a parameter of an FSDP2 model after a forward pass, as torch.nn.utils.vector_to_parameters does it.
# Expected: The parameter has these values and trains on, as in one process, or it has the old ones, or an error.
# Seen: The root is still unsharded, and its parameter leaves the memory that all-gathers fill. From then on the model
#   computes with these values in every step, whatever the optimizer does to the shards, without a warning.
#   "outputs of five steps: [0.0, 0.0, 0.0, 0.0, 0.0], in one process [0.0, -6.4, -12.8, -19.2, -25.6]"
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
from torch.nn.utils import vector_to_parameters


def outputs(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    x, found = torch.ones(2, 4), []
    model(x)
    vector_to_parameters(torch.zeros(4), model.parameters())
    for _ in range(5):
        loss = model(x).sum()
        found.append(round(loss.item(), 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


alone = outputs(torch.nn.Linear(4, 1, bias=False))
model = fully_shard(torch.nn.Linear(4, 1, bias=False), mesh=init_device_mesh("cpu", (2,)))
before = model.weight.full_tensor().clone()
sharded = outputs(model)
if dist.get_rank() == 0:
    print(f"outputs of five steps: {sharded}, in one process {alone}")
model.reshard()
change = (model.weight.full_tensor() - before).abs().max().item()
if dist.get_rank() == 0:
    print(f"change of the shards by the optimizer: {change:.1f}")
assert sharded == [0.0] * 5 and len(set(alone)) == 5 and change > 3
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
