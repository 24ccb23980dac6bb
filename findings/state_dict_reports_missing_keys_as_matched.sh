#!/usr/bin/env bash
# set_model_state_dict of torch.distributed.checkpoint.state_dict with full_state_dict=True, a sharded model, and a
# state that lacks its weight.
# Expected: strict=True raises an error; strict=False returns the missing key. All ranks report the same.
# Seen: "<All keys matched successfully>" with both, while the weight keeps its values. With broadcast_from_rank0=True and
#   strict=False, an unexpected key is reported on rank 0 only.
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,))
rank = dist.get_rank()
torch.manual_seed(0)
model = fully_shard(torch.nn.Linear(4, 4), mesh=mesh)
before = model.weight.full_tensor().clone()
state = {"bias": torch.ones(4)}  # and no weight
for strict in (True, False):
    result = set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True, strict=strict))
    print(f"rank {rank}, strict={strict}: {result}")
    assert str(result) == "<All keys matched successfully>"
    assert torch.equal(model.weight.full_tensor(), before)
more = {"weight": torch.ones(4, 4), "bias": torch.ones(4), "other": torch.ones(4)}
options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=True)
result = set_model_state_dict(model, more if rank == 0 else {}, options=options)
print(f"rank {rank}, an unexpected key in what rank 0 broadcasts: {result.unexpected_keys}")
assert result.unexpected_keys == (["other"] if rank == 0 else [])
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
