#!/usr/bin/env bash
# nn.Embedding(max_norm=1.0), which scales the rows of its tokens down in every forward pass, under DDP and FSDP2.
# Expected: The weights of one process, or at least the same on all replicas, or an error.
# Seen: DDP: each rank scales the rows of its own tokens only, and the replicas differ by up to 1.23 after three steps.
#   FSDP2: each forward pass scales the unsharded weight, and the shards keep their long rows: the norms are above 1 and
#   the weights are not those of one process. There is no warning.
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import copy
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def train(model, tokens):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens).pow(2).mean().backward()
        optimizer.step()


mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
alone = torch.nn.Embedding(8, 4, max_norm=1.0)
replica, sharded = copy.deepcopy(alone), fully_shard(copy.deepcopy(alone), mesh=mesh)
train(alone, torch.arange(8))
train(sharded, torch.arange(8).view(2, 4)[dist.get_rank()])
train(DistributedDataParallel(replica), torch.arange(8).view(2, 4)[dist.get_rank()])
weights = [torch.empty(8, 4) for _ in range(2)]
dist.all_gather(weights, replica.weight.detach())
apart = (weights[0] - weights[1]).abs().max().item()
weight = sharded.weight.full_tensor()
off, norm = (weight - alone.weight).abs().max().item(), weight.norm(dim=1).max().item()
if dist.get_rank() == 0:
    print(f"DDP: replicas differ by {apart:.2f}")
    print(f"FSDP2: {off:.2f} from the weights of one process, longest row {norm:.2f}")
assert apart > 0.5 and off > 0.5 and norm > 1.5
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
