#!/usr/bin/env bash
# FSDP1 with use_orig_params=True, and a forward that reads a parameter of another unit (self.last.scale) instead of
# calling the unit.
# Expected: The parameter as the module has it, or an error.
# Seen: The parameter is the rank's slice of it: of two elements, each rank has one, which broadcasts to both, without a
#   warning. Slices that do not broadcast raise an error.
#   "rank 0: one process [[4.0, 16.0]], FSDP [[4.0, 8.0]]", "rank 1: one process [[4.0, 16.0]], FSDP [[8.0, 16.0]]"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x):
        return x * self.scale


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.first, self.last = torch.nn.Linear(4, 2, bias=False), Scale(), Scale()
        torch.nn.init.ones_(self.linear.weight)

    def forward(self, x):
        return self.first(self.linear(x)) * self.last.scale


dist.init_process_group("gloo")
rank = dist.get_rank()
alone = Model()(torch.ones(1, 4)).tolist()
model = FSDP(Model(), auto_wrap_policy=ModuleWrapPolicy({Scale}), device_id=torch.device("cpu"), use_orig_params=True)
out = model(torch.ones(1, 4)).tolist()
print(f"rank {rank}: one process {alone}, FSDP {out}")
assert alone == [[4.0, 16.0]] and out == [[[4.0, 8.0]], [[8.0, 16.0]]][rank]
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
