#!/usr/bin/env bash
# set_model_state_dict of torch.distributed.checkpoint.state_dict with full_state_dict=True and broadcast_from_rank0=True,
# for a model with a transposed buffer.
# Expected: All ranks get the values of rank 0.
# Seen: Rank 1 gets them in the order in which they lie in rank 0's memory, without a warning. Once the saved tensors are
#   contiguous, both ranks get the same.
#   "rank 0: <All keys matched successfully>, first row [0.0, 4.0, 8.0]", "rank 1: <All keys matched successfully>,
#   first row [0.0, 1.0, 2.0]"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


class Model(torch.nn.Module):
    def __init__(self, values):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("table", values.reshape(3, 4).t())


dist.init_process_group("gloo")
rank = dist.get_rank()
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
state = Model(torch.arange(12.0)).state_dict()
rows = []
for saved in (state, {name: value.contiguous() for name, value in state.items()}):
    model = Model(torch.zeros(12))
    result = set_model_state_dict(model, saved if rank == 0 else {}, options=options)
    rows.append(model.table[0].tolist())
    print(f"rank {rank}: {result}, first row {rows[-1]}")
    assert str(result) == "<All keys matched successfully>"
assert rows == [[[0.0, 4.0, 8.0], [0.0, 1.0, 2.0]][rank], [0.0, 4.0, 8.0]]
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
