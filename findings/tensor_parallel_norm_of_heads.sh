#!/usr/bin/env bash
# Attention under parallelize_module, with q, k and v colwise and o rowwise, and a norm of the query heads (over head_dim,
# one weight for all heads) that the plan leaves as it is.
# Expected: The gradients of one process, or an error.
# Seen: The output and the gradients of the projections are right. The norm's weight gets the gradient of the rank's own
#   heads only: other values on each rank, which no one sums, without a warning. After the first step, its copies differ.
#   "rank 0: output right, gradient of q_norm off by 53.33, of the others by at most 0.00, of q_norm summed over
#   the ranks by 0.00"
# Versions: torch 2.13.0 on CPU, two ranks over gloo, Python 3.11, Linux; run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(16, 16, bias=False) for _ in range(4))
        self.q_norm = torch.nn.RMSNorm(4)

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        heads = torch.nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v)
        return self.o(heads.transpose(1, 2).flatten(2))


mesh = init_device_mesh("cpu", (2,))
rank = dist.get_rank()


def run(plan):
    torch.manual_seed(0)
    model = parallelize_module(Attention(), mesh, plan)
    out = model(torch.randn(2, 5, 16))
    (10 * out).square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return out.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()}


out, right = run({})
other_out, other = run({"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()})
off = {name: (other[name] - right[name]).abs().max().item() for name in right}
norm = off.pop("q_norm.weight")
total = other["q_norm.weight"].clone()
dist.all_reduce(total)
summed = (total - right["q_norm.weight"]).abs().max().item()
same = "right" if torch.allclose(out, other_out, atol=1e-4) else "wrong"
print(f"rank {rank}: output {same}, gradient of q_norm off by {norm:.2f}, of the others by at most {max(off.values()):.2f}, "
      f"of q_norm summed over the ranks by {summed:.2f}")
assert same == "right" and norm > 1 and max(off.values()) < 0.01 and summed < 0.01
dist.barrier()
dist.destroy_process_group()
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/case.py"
echo "as described"
