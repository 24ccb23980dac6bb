#!/usr/bin/env bash
# all_reduce with MAX over gloo, with a NaN on one of two ranks.
# Expected: NaN on all ranks, or a result that does not depend on which rank has the NaN.
# Seen: NaN if rank 0 has it; the other rank's number if rank 1 has it. So the infinity norm of gradients can lose a
#   NaN.
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist

dist.init_process_group("gloo")
values = torch.tensor([float("nan") if dist.get_rank() else 1.0])
dist.all_reduce(values, op=dist.ReduceOp.MAX)
other = torch.tensor([float("nan") if dist.get_rank() == 0 else 1.0])
dist.all_reduce(other, op=dist.ReduceOp.MAX)
print(f"rank {dist.get_rank()}: max of 1, nan is {values.item()}; max of nan, 1 is {other.item()}")
assert values.item() == 1.0 and other.item() != other.item()
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
