#!/usr/bin/env bash
# item() on a DTensor that is a pending sum (the norm or the sum of a sharded tensor).
# Expected: item() returns the value of the full tensor, like full_tensor().item(), or raises an error.
# Seen: item() returns the rank's own part: sums 3.0 and 7.0 instead of 10.0, norms 2.236 and 5.0 instead of 5.477.
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), mesh, [Shard(0)])
norm, total = x.norm(), x.sum()
print(f"rank {dist.get_rank()}: norm.item() {norm.item():.3f}, sum.item() {total.item()}, full {norm.full_tensor().item():.3f}, {total.full_tensor().item()}")
assert total.item() == (3.0, 7.0)[dist.get_rank()] and total.full_tensor().item() == 10.0
assert abs(norm.item() - (5**0.5, 5.0)[dist.get_rank()]) < 1e-5
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
