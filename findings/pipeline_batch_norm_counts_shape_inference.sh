#!/usr/bin/env bash
# num_batches_tracked of a BatchNorm in a pipeline stage after one step of 4 micro-batches.
# Expected: 4.
# Seen: 5: the shapes are inferred by a run of the module on made-up input, in training mode, which also moves the
#   running statistics.
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
stage = PipelineStage(module, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
x, target = torch.randn(8, 4), torch.zeros(8, 4)
schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == 1 else {}))
print(f"rank {rank}: batches tracked after one step of 4 micro-batches: {module[1].num_batches_tracked.item()}")
assert module[1].num_batches_tracked.item() == 5
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
