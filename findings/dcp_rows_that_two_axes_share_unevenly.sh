#!/usr/bin/env bash
# torch's FSDP2 over tensor parallelism cannot save a weight whose rows its two axes share unevenly.
# Expected: torch.distributed.checkpoint saves each rank's rows where they are in the whole weight: 257 rows over 2
#   tensor-parallel ranks are 129 and 128, and those over 4 data-parallel ranks 33, 33, 33, 30 and 32, 32, 32, 32.
# Seen: The DTensor computes 31 rows from row 99 on for the rank that has 30, and saving ends in an error. The error is
#   no Exception (it derives from BaseException), so `except Exception` around a save does not see it. 256 rows are
#   saved.
#   "256 rows: saved"
#   "257 rows: CheckpointException, an Exception: False, overlapping chunks: True"
# Versions: torch 2.13.0 on CPU, gloo, eight processes, Python 3.11, Linux; run on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import sys

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def work(rank, folder, answers):
    dist.init_process_group("gloo", rank=rank, world_size=8, init_method=f"file://{folder}/store")
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    for rows in (256, 257):
        model = nn.Sequential(nn.Linear(4, rows, bias=False))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
        fully_shard(model, mesh=mesh["dp"])
        said = "saved"
        try:
            dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{rows}")
        except BaseException as error:
            overlap = "overlapping chunks" in str(error)
            said = f"{type(error).__name__}, an Exception: {isinstance(error, Exception)}, overlapping chunks: {overlap}"
        if rank == 0:
            answers.put(f"{rows} rows: {said}")
    dist.barrier()


if __name__ == "__main__":
    answers = mp.get_context("fork").SimpleQueue()
    mp.start_processes(work, (sys.argv[1], answers), nprocs=8, start_method="fork")
    found = [answers.get(), answers.get()]
    print(*found, sep="\n")
    assert found == [
        "256 rows: saved",
        "257 rows: CheckpointException, an Exception: False, overlapping chunks: True",
    ]
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/case.py" "$folder" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
echo "as described"
