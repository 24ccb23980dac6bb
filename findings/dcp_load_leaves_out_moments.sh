#!/usr/bin/env bash
# torch.distributed.checkpoint.load into the state dict of a new Adam.
# Expected: The saved moments are loaded, or an error because they have no place.
# Seen: The learning rate comes back, the moments and the step count are left out, without a warning. (With
#   torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, they are loaded.)
#   "saved: lr 0.1, 2 states; loaded: lr 0.1, 0 states"
# Versions: torch 2.13.0 on CPU, one process, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import tempfile
import torch, torch.distributed.checkpoint as dcp


def made(lr):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    return model, torch.optim.Adam(model.parameters(), lr=lr)


model, optimizer = made(0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
with tempfile.TemporaryDirectory() as folder:
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder, no_dist=True)
    _, new = made(0.5)
    state = {"optimizer": new.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    new.load_state_dict(state["optimizer"])
print(f"saved: lr {optimizer.param_groups[0]['lr']}, {len(optimizer.state)} states; "
      f"loaded: lr {new.param_groups[0]['lr']}, {len(new.state)} states")
assert new.param_groups[0]["lr"] == 0.1 and len(optimizer.state) == 2 and len(new.state) == 0
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/case.py"
echo "as described"
