#!/usr/bin/env bash
# An optimizer that steps in a post-accumulate-grad hook under DistributedDataParallel uses the rank's own gradient.
# Expected: The hook runs after the reduction, as after FSDP2, or the step is refused.
# Seen: The hook runs before the reduction, so the replicas diverge without a warning: steps of 1.0 and 2.0 instead
#   of 1.5.
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
model = DDP(torch.nn.Linear(4, 1, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)


def step(_):
    optimizer.step()
    optimizer.zero_grad()


model.module.weight.register_post_accumulate_grad_hook(step)
before = model.module.weight.detach().clone()
model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
change = (before - model.module.weight.detach())[0, 0]
changes = [torch.empty_like(change) for _ in range(2)]
dist.all_gather(changes, change.contiguous())
if dist.get_rank() == 0:
    print("step of rank 0:", changes[0].item(), " of rank 1:", changes[1].item(), " expected on both: 1.5")
assert abs(changes[0].item() - 1.0) < 1e-5 and abs(changes[1].item() - 2.0) < 1e-5
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
