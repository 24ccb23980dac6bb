#!/usr/bin/env bash
# Gradient accumulation over several schedule.step() calls of torch.distributed.pipelining, with the default
#   scale_grads=True.
# Expected: 1, 2 and 3 times the gradient of one step.
# Seen: Each step also divides the gradients that were there before by the number of micro-batches: 1, 1.25 and
#   1.3125 times.
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
module = torch.nn.Linear(4, 4)
stage = PipelineStage(module, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
x, target, norms = torch.ones(8, 4), torch.zeros(8, 4), []
for _ in range(3):  # without zero_grad: gradients accumulate
    schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == 1 else {}))
    norms.append(module.weight.grad.norm().item())
ratios = [n / norms[0] for n in norms]
print(f"rank {rank}: gradients after 1, 2, 3 steps: {ratios}")
assert [round(r, 4) for r in ratios] == [1.0, 1.25, 1.3125]
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
