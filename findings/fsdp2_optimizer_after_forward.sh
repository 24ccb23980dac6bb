#!/usr/bin/env bash
# An optimizer that is built between the forward and the backward pass of an FSDP2 model.
# Expected: It trains the model, or an error.
# Seen: The root is still unsharded, so the optimizer holds plain parameters that are never updated: its step
#   changes nothing, without a warning.
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

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
x = torch.ones(2, 4)
loss = model(x).square().sum()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # the root unit is unsharded between forward and backward
loss.backward()
before = model.weight.full_tensor().clone()
optimizer.step()
change = (model.weight.full_tensor() - before).abs().max().item()
print(f"rank {dist.get_rank()}: gradient {model.weight.grad.full_tensor().abs().max().item():.2f}, change by the step {change}")
assert change == 0.0 and model.weight.grad.full_tensor().abs().max().item() > 0
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
