#!/usr/bin/env bash
# The Hugging Face writer of torch.distributed.checkpoint, with its defaults, for a model under fully_shard.
# Expected: Whole weights, or a file per rank.
# Seen: One file that has the rows of one rank only. Half of the weights are lost, without a warning or an error. With
#   save_distributed=True and enable_consolidation=True, the file has the whole weight.
#   "1 file, weight [2, 4] of [4, 4]: its rows [2, 3]"; in another run, rows [0, 1]
# Versions: torch 2.13.0 on CPU, safetensors 0.8.0, fsspec 2026.9.0, two ranks over gloo, Python 3.11, Linux;
#   run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 fsspec==2026.9.0
cat > "$folder/case.py" <<'PY'
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=mesh)
whole = model.weight.full_tensor()
dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(path=f"{sys.argv[1]}/default"))
writer = dcp.HuggingFaceStorageWriter(path=f"{sys.argv[1]}/all", save_distributed=True, enable_consolidation=True)
dcp.save(model.state_dict(), storage_writer=writer)
if dist.get_rank() == 0:
    torch.save(whole, f"{sys.argv[1]}/whole.pt")
dist.destroy_process_group()
PY
cat > "$folder/check.py" <<'PY'
import glob, sys
import torch
from safetensors.torch import load_file

whole = torch.load(f"{sys.argv[1]}/whole.pt")
files = glob.glob(f"{sys.argv[1]}/default/*.safetensors")
saved = load_file(files[0])["weight"]
rows = [row for row in range(4) if any(torch.equal(each, whole[row]) for each in saved)]
print(f"{len(files)} file, weight {list(saved.shape)} of {list(whole.shape)}: its rows {rows}")
assert len(files) == 1 and list(saved.shape) == [2, 4] and rows in ([0, 1], [2, 3])
consolidated = load_file(glob.glob(f"{sys.argv[1]}/all/*.safetensors")[0])["weight"]
print("with save_distributed and enable_consolidation:", list(consolidated.shape))
assert torch.equal(consolidated, whole)
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py" "$folder/out"
"$folder/venv/bin/python" "$folder/check.py" "$folder/out"
echo "as described"
