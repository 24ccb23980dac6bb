#!/usr/bin/env bash
# A dataclass with a tensor for each sample as a keyword argument of schedule.step() of torch.distributed.pipelining.
# Expected: Each micro-batch gets its samples of the tensor, as it does if the tensor is in a dict, or an error.
# Seen: Each micro-batch gets the tensor of the whole batch. With micro-batches of one sample, it broadcasts, and the losses
#   are wrong, without a warning.
#   "losses with a dict: [0.65, 1.17, 1.09, 7.24], with a dataclass: [9.01, 9.05, 3.83, 14.0]"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
from dataclasses import dataclass

import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


@dataclass
class Extra:
    scale: torch.Tensor


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x, extra=None):
        if extra is None:  # the second stage
            return self.linear(x)
        return self.linear(x) * (extra["scale"] if isinstance(extra, dict) else extra.scale)


def losses_with(extra):
    torch.manual_seed(0)
    stage, losses = PipelineStage(Model(), rank, 2, torch.device("cpu")), []
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda out, target: (out - target).square().sum())
    torch.manual_seed(3)
    x, target = torch.randn(4, 4), torch.zeros(4, 4)
    schedule.step(*([x] if rank == 0 else []), **({"extra": extra} if rank == 0 else {"target": target, "losses": losses}))
    return [round(loss.item(), 2) for loss in losses]


dist.init_process_group("gloo")
rank = dist.get_rank()
scale = torch.arange(1.0, 5.0).reshape(4, 1)
right, other = losses_with({"scale": scale}), losses_with(Extra(scale))
if rank == 1:
    print(f"losses with a dict: {right}, with a dataclass: {other}")
    assert all(abs(a - b) > 1 for a, b in zip(right, other))
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
