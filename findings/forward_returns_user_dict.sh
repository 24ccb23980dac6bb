#!/usr/bin/env bash
# A model under fully_shard or DDP with static_graph=True, whose forward returns a collections.UserDict.
# Expected: It trains as with a dict, or an error.
# Seen: Under fully_shard, the loss never changes: the gradients go to the unsharded parameters, which the optimizer does
#   not have. Under DDP with static_graph=True, each rank trains with its own gradients. Neither warns. Plain DDP is right.
#   "fully_shard: losses [2.2662, 1.4379, 0.945], with UserDict [2.2662, 2.2662, 2.2662]"
#   "DDP with static_graph: losses [2.2662, 1.4379, 0.945], with UserDict [2.2662, 1.1324, 0.6281]"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
from collections import UserDict

import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cpu", (2,))
rank = dist.get_rank()


class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = torch.nn.Linear(4, 1), kind

    def forward(self, x):
        return self.kind(logits=self.linear(x))


def train(wrap, kind):
    torch.manual_seed(0)
    model = wrap(Model(kind))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    x, losses = torch.randn(8, 4), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x)["logits"] - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
    return losses


wrappers = {
    "DDP": DistributedDataParallel,
    "DDP with static_graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "fully_shard": lambda model: fully_shard(model, mesh=mesh),
}
for name, wrap in wrappers.items():
    right, other = train(wrap, dict), train(wrap, UserDict)
    if rank == 0:
        print(f"{name}: losses {right}, with UserDict {other}")
    assert (right == other) == (name == "DDP")
    assert (len(set(other)) == 1) == (name == "fully_shard")
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
