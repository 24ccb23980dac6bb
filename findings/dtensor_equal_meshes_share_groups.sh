#!/usr/bin/env bash
# A DTensor computed on the "tp" dimension of one mesh, after the same operation ran on the equal "tp" dimension of another.
# Expected: the result lies on the mesh of its input, and communicates over that mesh's process group.
# Seen: the two sub-meshes compare equal (same ranks and names), so the cached result of the operation names the first mesh:
#   the sum of a tensor on the second mesh is reduced over the first one's group. Ranks that have not met the first mesh
#   would use another group than those that have.
# Versions: torch 2.13.0 on CPU, four ranks over gloo, Python 3.11, Linux; run on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
assert first == second and first.get_group() is not second.get_group()
totals = []
for mesh in (first, second):
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    totals.append((x, x.sum()))
x, total = totals[1]
names = [mesh.get_group().group_name for mesh in (first, second, x.device_mesh, total.device_mesh)]
print(f"rank {dist.get_rank()}: group of the first {names[0]}, of the second {names[1]}, of the input {names[2]}, of its sum {names[3]}")
assert x.device_mesh is second and total.device_mesh is first
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 4 "$folder/case.py"
echo "as described"
