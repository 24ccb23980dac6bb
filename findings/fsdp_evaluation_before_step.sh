#!/usr/bin/env bash
# A forward pass under no_grad between the backward pass and the step, for instance to log the accuracy, with fully_shard
# and with FSDP1.
# Expected: It changes nothing.
# Seen: It leaves the parameters of the root unsharded, and the next forward pass uses them again, as they were before the
#   step, without a warning. So every step uses gradients of the weights before the last step. The same goes for an
#   update by hand, without an optimizer.
#   "fully_shard: [0.5549, 0.3121, 0.1756], with the forward pass: [0.5549, 0.5549, 0.3121]"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cpu", (2,))
wrappers = {
    "DDP": DistributedDataParallel,
    "fully_shard": lambda model: fully_shard(model, mesh=mesh),
    "FSDP1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
}


def train(wrap, evaluate, by_hand):
    torch.manual_seed(0)
    model = wrap(torch.nn.Linear(4, 4))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        losses.append(round(loss.item(), 4))
        with torch.no_grad():
            if evaluate:
                model(torch.ones(2, 4))
            if by_hand:
                for p in parameters:
                    p -= 0.1 * p.grad
            else:
                optimizer.step()
    return losses


for name, wrap in wrappers.items():
    for by_hand in (False, True):
        right, other = train(wrap, False, by_hand), train(wrap, True, by_hand)
        if dist.get_rank() == 0:
            print(f"{name}{', by hand' * by_hand}: {right}, with the forward pass: {other}")
        assert other == (right if name == "DDP" else [right[0], *right[:2]])
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
