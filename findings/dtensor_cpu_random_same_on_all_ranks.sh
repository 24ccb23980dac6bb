#!/usr/bin/env bash
# reset_parameters() after to_empty(), for a module that FSDP2 has sharded over a CPU mesh, with the same seed on
#   all ranks.
# Expected: The values of one process with this seed, as documented for DTensor on devices with a random-number
#   tracker.
# Seen: Each rank draws its shard by itself: all shards have the same numbers. Only a general warning about the mesh
#   is shown.
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

mesh = init_device_mesh("cpu", (2,))
with torch.device("meta"):
    model = torch.nn.Linear(4, 4)
fully_shard(model, mesh=mesh)
model.to_empty(device="cpu")
torch.manual_seed(0)
model.reset_parameters()
full = model.weight.full_tensor()
if dist.get_rank() == 0:
    print("rows of rank 0 equal those of rank 1:", torch.equal(full[:2], full[2:]))
assert torch.equal(full[:2], full[2:])
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
