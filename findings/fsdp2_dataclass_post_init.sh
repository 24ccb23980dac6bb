#!/usr/bin/env bash
# FSDP2 with mixed precision, and a dataclass as input whose __post_init__ scales a tensor.
# Expected: forward gets the same fields with other dtypes.
# Seen: The dataclass is rebuilt by its constructor, more than once: 2.0 arrives as 8.0, without a warning.
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
from dataclasses import dataclass

import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@dataclass
class Batch:
    x: torch.Tensor

    def __post_init__(self):
        self.x = self.x * 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, batch):
        self.seen = batch.x.detach().float()
        return self.linear(batch.x)


mesh = init_device_mesh("cpu", (2,))
model = fully_shard(Model(), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
batch = Batch(torch.ones(1, 4))
model(batch)
print(f"rank {dist.get_rank()}: caller's batch {batch.x[0, 0].item()}, forward's batch {model.seen[0, 0].item()}")
assert batch.x[0, 0].item() == 2.0 and model.seen[0, 0].item() == 8.0
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
