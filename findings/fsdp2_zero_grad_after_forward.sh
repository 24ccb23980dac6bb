#!/usr/bin/env bash
# model.zero_grad() between the forward and the backward pass of an FSDP2 model, as many training loops have it:
# loss = model(x); model.zero_grad(); loss.backward(); optimizer.step().
# Expected: Each step has the gradient of its own batch, as in one process.
# Seen: The root is still unsharded, so model.parameters() yields plain parameters whose .grad is None. The gradients are
#   at the shards, and nothing drops them: they pile up, without a warning. optimizer.zero_grad() drops them.
#   "model.zero_grad(): [2.0, 4.0, 6.0], in one process [2.0, 2.0, 2.0]"
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


def gradients(model, zero_grad):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).sum()
        zero_grad(model, optimizer)
        loss.backward()
        optimizer.step()
        grad = model.weight.grad
        found.append((grad.full_tensor() if hasattr(grad, "full_tensor") else grad).max().item())
    return found


cases = {
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
}
mesh = init_device_mesh("cpu", (2,))
for name, zero_grad in cases.items():
    alone = gradients(torch.nn.Linear(4, 4), zero_grad)
    sharded = gradients(fully_shard(torch.nn.Linear(4, 4), mesh=mesh), zero_grad)
    if dist.get_rank() == 0:
        print(f"{name}: {sharded}, in one process {alone}")
    assert alone == [2.0, 2.0, 2.0] and sharded == (alone if name.startswith("optimizer") else [2.0, 4.0, 6.0])
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
