#!/usr/bin/env bash
# ZeroRedundancyOptimizer of torch.distributed.optim, whose ranks list the same parameters in different orders, as a set of
# names does (the order of a set of strings is another in each process).
# Expected: The result of the plain optimizer, which does not depend on the order, or an error.
# Seen: Each rank assigns the parameters to ranks by its own order, and receives values of one parameter in another of
#   the same size, without a warning. The ranks train different models.
#   "rank 0: SGD off by 0.00, ZeroRedundancyOptimizer by 0.69, on the other rank by 0.56"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def train(made, reverse):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))))
    optimizer = made(list(model.parameters())[:: -1 if reverse else 1])
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def zero(parameters):
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


dist.init_process_group("gloo")
rank = dist.get_rank()
same_order = train(zero, False)
plain, sharded = train(sgd, rank == 1), train(zero, rank == 1)
off = [(each - same_order).abs().max().item() for each in (plain, sharded)]
offs = [None, None]
dist.all_gather_object(offs, off[1])
if rank == 0:
    print(f"rank 0: SGD off by {off[0]:.2f}, ZeroRedundancyOptimizer by {off[1]:.2f}, on the other rank by {offs[1]:.2f}")
assert off[0] < 1e-6 and off[1] > 0.1 and abs(offs[0] - offs[1]) > 0.1
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
