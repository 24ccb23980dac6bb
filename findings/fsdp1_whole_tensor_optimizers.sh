#!/usr/bin/env bash
# Optimizers that combine the elements of a parameter, on FSDP1's flat shards.
# Expected: The result of one process, or an error.
# Seen: LBFGS and Adafactor update each rank's piece by itself, without a warning: other losses after three steps.
#   SGD is right.
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def train(model, kind):
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randn(8, 5)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return closure().item()


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))


dist.init_process_group("gloo")
for kind in (torch.optim.SGD, torch.optim.LBFGS, torch.optim.Adafactor):
    alone = train(build(), kind)
    sharded = train(FSDP(build(), device_id=torch.device("cpu"), use_orig_params=True), kind)
    if dist.get_rank() == 0:
        print(f"{kind.__name__}: one process {alone:.5f}, FSDP with the same batch on both ranks {sharded:.5f}")
    assert (abs(alone - sharded) < 1e-5) == (kind is torch.optim.SGD)
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
