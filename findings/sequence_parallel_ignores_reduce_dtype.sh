#!/usr/bin/env bash
# FSDP2 with reduce_dtype=float32 over a bf16 LayerNorm that is sequence-parallel.
# Expected: The gradient of the norm is summed over tensor-parallel ranks in fp32: 256 + 1 = 257.
# Seen: The sum over tensor-parallel ranks is made in bf16: 256. reduce_dtype concerns the data-parallel dimension
#   only.
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
norm = torch.nn.LayerNorm(4)
parallelize_module(norm, mesh["tp"], SequenceParallel())
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(norm, mesh=mesh["dp"], mp_policy=policy)
rank = dist.get_rank()
x = torch.randn(1, 1, 4)
out = norm(x)
weights = torch.full_like(out.to_local() if isinstance(out, DTensor) else out, 256.0 if rank == 0 else 1.0)
((out.to_local() if isinstance(out, DTensor) else out) * weights).sum().backward()
gradient = norm.bias.grad.full_tensor()
print(f"rank {rank}: 256 + 1 in reduce_dtype=float32: {gradient[0].item()} ({gradient.dtype})")
assert gradient[0].item() == 256.0
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
