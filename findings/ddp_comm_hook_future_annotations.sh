#!/usr/bin/env bash
# A DDP communication hook in a file with `from __future__ import annotations`.
# Expected: The annotation dist.GradBucket is accepted, as without the import.
# Seen: A ValueError that asks for the annotation that is there: annotations are strings after this import.
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
from __future__ import annotations

import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])


dist.init_process_group("gloo")
try:
    DDP(torch.nn.Linear(4, 4)).register_comm_hook(None, hook)
    raise SystemExit("accepted")
except ValueError as error:
    print(f"rank {dist.get_rank()}: ValueError: {error}")
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
