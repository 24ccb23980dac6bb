#!/usr/bin/env bash
# set_model_state_dict of torch.distributed.checkpoint.state_dict, with full_state_dict=True, for a model on the meta
# device whose embedding and head share a weight.
# Expected: They still share it afterwards.
# Seen: Each gets a parameter of its own, and training moves them apart, without a warning.
#   "before: True", "<All keys matched successfully>", "after: False"
# Versions: torch 2.13.0 on CPU, one process, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


source = Tied().state_dict()
with torch.device("meta"):
    model = Tied()
print("before:", model.head.weight is model.embed.weight)
assert model.head.weight is model.embed.weight
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
print(set_model_state_dict(model, source, options=StateDictOptions(full_state_dict=True)))
print("after:", model.head.weight is model.embed.weight)
assert model.head.weight is not model.embed.weight and not model.head.weight.is_meta
torch.distributed.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/case.py"
echo "as described"
