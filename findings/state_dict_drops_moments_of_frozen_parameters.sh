#!/usr/bin/env bash
# get_optimizer_state_dict and set_optimizer_state_dict with parameters that were trained and then frozen.
# Expected: What is saved is loaded.
# Seen: All four states are saved, those of frozen parameters are dropped on loading, also with strict=True. Training that
#   unfreezes them goes on with moments of zero.
#   "saved: ['0.bias', '0.weight', '1.bias', '1.weight'] loaded: ['1.bias', '1.weight']"
# Versions: torch 2.13.0 on CPU, one process, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


model, optimizer = made()
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
model[0].requires_grad_(False)
saved = get_optimizer_state_dict(model, optimizer)
other, loaded = made()
other[0].requires_grad_(False)
set_optimizer_state_dict(other, loaded, saved)
names = [name for name, p in other.named_parameters() if p in loaded.state]
print("saved:", sorted(saved["state"]), "loaded:", sorted(names))
assert len(saved["state"]) == 4 and sorted(names) == ["1.bias", "1.weight"]
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/case.py"
echo "as described"
