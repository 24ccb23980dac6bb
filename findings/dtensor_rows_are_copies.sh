#!/usr/bin/env bash
# Writing to some rows of a weight that fully_shard has sharded: the row of the padding token, as model code sets it to
# zero in its initialization, nn.init on a slice, and nn.init on the three parts of a fused projection.
# Expected: The weight changes, as the same lines change a plain one, or an error.
# Seen: Indexing the sharded dimension gathers a copy, and the copy is written: the weight keeps all its values, without a
#   warning about this. After reset_parameters() of nn.Embedding itself, the padding row is not zero either.
#   "w.data[0].zero_(): 4 of a plain weight's elements change, 0 of a sharded one's"
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


def row(w):
    w.data[0].zero_()


def rows(w):
    torch.nn.init.zeros_(w[:3])


def parts(w):
    for part in w.chunk(3):
        torch.nn.init.zeros_(part)


def columns(w):
    torch.nn.init.zeros_(w[:, :3])


mesh = init_device_mesh("cpu", (2,))
cases = {"w.data[0].zero_()": row, "zeros_(w[:3])": rows, "zeros_ of w.chunk(3)": parts, "zeros_(w[:, :3])": columns}
for name, write in cases.items():
    plain, sharded = torch.nn.Embedding(6, 4), fully_shard(torch.nn.Embedding(6, 4), mesh=mesh)
    before = plain.weight.detach().clone(), sharded.weight.full_tensor().clone()
    write(plain.weight)
    write(sharded.weight)
    changed = [(new != old).sum().item() for new, old in zip((plain.weight, sharded.weight.full_tensor()), before)]
    if dist.get_rank() == 0:
        print(f"{name}: {changed[0]} of a plain weight's elements change, {changed[1]} of a sharded one's")
    assert changed[0] > 0 and changed[1] == (changed[0] if write is columns else 0)
embedding = fully_shard(torch.nn.Embedding(6, 4, padding_idx=0), mesh=mesh)
embedding.reset_parameters()
zeros = (embedding.weight.full_tensor()[0] == 0).sum().item()
if dist.get_rank() == 0:
    print(f"zeros in the padding row after nn.Embedding.reset_parameters(): {zeros} of 4")
assert zeros == 0
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
