#!/usr/bin/env bash
# torch.utils.checkpoint without reentry runs a block again in backward only on the ranks where it has saved a tensor.
# Expected: The block's forward, with its collectives, runs twice on every rank.
# Seen: A rank whose part of the work is empty, such as one without heads or without tokens, saves nothing in the block
#   and runs it once. Here that is only counted; with a collective inside, the ranks' orders would no longer agree.
#   "forwards of the block: rank with 2 rows 2, rank with 0 rows 1; reentrant 2 and 2"
# Versions: torch 2.13.0 on CPU, one process that plays both ranks, Python 3.11, Linux; run on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import torch
from torch.utils.checkpoint import checkpoint


def forwards(rows: int, reentrant: bool) -> int:
    count = 0

    def block(x):
        nonlocal count
        count += 1
        mine = x[:rows]  # this rank's share of the work
        return x + (mine.exp().sum() if rows else 0.0)  # where a collective would add all ranks' parts

    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    return count


plain = [forwards(rows, False) for rows in (2, 0)]
again = [forwards(rows, True) for rows in (2, 0)]
print(f"forwards of the block: rank with 2 rows {plain[0]}, rank with 0 rows {plain[1]}; reentrant {again[0]} and {again[1]}")
assert plain == [2, 1] and again == [2, 2]
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/case.py"
echo "as described"
