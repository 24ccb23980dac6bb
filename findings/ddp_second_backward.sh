#!/usr/bin/env bash
# DistributedDataParallel reduces only the first backward pass after a forward pass.
# Expected: A second backward of the same forward is reduced like the first, or refused.
# Seen: The second backward's gradients stay local, without a warning: the ranks' gradients differ (5.0 and 7.0
#   instead of 6.0).
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1))
out = model(torch.full((2, 4), 1.0 + dist.get_rank()))
out.sum().backward(retain_graph=True)
out.sum().backward()
gradient = model.module.weight.grad.clone()
others = [torch.empty_like(gradient) for _ in range(2)]
dist.all_gather(others, gradient)
if dist.get_rank() == 0:
    print("gradient of rank 0:", others[0][0, 0].item(), " of rank 1:", others[1][0, 0].item(), " mean of two backwards: 6.0")
assert (others[0][0, 0].item(), others[1][0, 0].item()) == (5.0, 7.0)
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
