#!/usr/bin/env bash
# torch.distributed.checkpoint saves BatchNorm statistics that differ by rank, as DistributedDataParallel leaves them.
# Expected: Those of rank 0.
# Seen: Each entry is saved once, from a rank chosen for each, to share the work. The mean is of one rank's samples, the
#   variance of another's: a pair that no rank has had.
#   "saved from rank: {'running_mean': [0], 'running_var': [1]}"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.BatchNorm1d(3))
torch.manual_seed(rank)
model(torch.randn(8, 3)).sum().backward()  # each rank's statistics are those of its own samples
state = {name: value for name, value in model.module.state_dict().items() if value.dim()}
of_ranks = [None, None]
dist.all_gather_object(of_ranks, state)
dcp.save(state, checkpoint_id=sys.argv[1])
loaded = {name: torch.zeros_like(value) for name, value in state.items()}
dcp.load(loaded, checkpoint_id=sys.argv[1])
owners = {name: [r for r in (0, 1) if torch.equal(loaded[name], of_ranks[r][name])] for name in state}
if rank == 0:
    print("saved from rank:", {name: owners[name] for name in ("running_mean", "running_var")})
assert sorted([owners["running_mean"], owners["running_var"]]) == [[0], [1]]
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py" "$folder/out"
echo "as described"
