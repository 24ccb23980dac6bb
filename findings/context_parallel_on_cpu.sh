#!/usr/bin/env bash
# torch's context_parallel, of torch.distributed.tensor.experimental, cannot train on CPUs.
# Expected: Two ranks of gloo, with half a sequence each, attend to all of it, or the context refuses a mesh of CPUs.
# Seen: The context is entered, and divides the buffers among the ranks. The attention of tensors that need a gradient
#   then ends in an error: torch has an operator of its own for it on CPUs, for which no rule says how it is sharded. So a
#   script cannot be tried on a laptop before it runs on GPUs.
#   "[1, 2, 8, 8] on each rank"
#   "NotImplementedError: aten._scaled_dot_product_flash_attention_for_cpu.default has no sharding strategy"
# Versions: torch 2.13.0 on CPU, gloo, two processes, Python 3.11, Linux; run on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel


def work(rank, folder, answers):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    whole = [torch.randn(1, 2, 16, 8) for _ in range(3)]
    said = "no error"
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=whole, buffer_seq_dims=[2, 2, 2]):
        mine = [part.clone().requires_grad_() for part in whole]
        shape = [*mine[0].shape]
        try:
            F.scaled_dot_product_attention(*mine, is_causal=True)
        except NotImplementedError as error:
            words = str(error).split()
            ending = "has no sharding strategy" if "sharding strategy" in str(error) else "fails otherwise"
            said = f"{type(error).__name__}: {words[1]} {ending}"
    if rank == 0:
        answers.put((f"{shape} on each rank", said))


if __name__ == "__main__":
    answers = mp.get_context("fork").SimpleQueue()
    mp.start_processes(work, (sys.argv[1], answers), nprocs=2, start_method="fork")
    found = [*answers.get()]
    print(*found, sep="\n")
    assert found == [
        "[1, 2, 8, 8] on each rank",
        "NotImplementedError: aten._scaled_dot_product_flash_attention_for_cpu.default has no sharding strategy",
    ]
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/case.py" "$folder" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
echo "as described"
