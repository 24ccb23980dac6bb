#!/usr/bin/env bash
# A job under torchrun --max-restarts, restarted after one of its ranks has died.
# Expected: The second attempt meets in a store of its own. _create_c10d_store says so: "We create a new TCPStore for
#   every retry so no need to add prefix for each attempt."
# Seen: The agent serves one store, on one port, for all attempts, so the second attempt finds all keys of the first. A
#   process group over gloo may take the address of a dead rank from there: of six restarts of a job with two ranks, two
#   went well, two failed again before they went well ("Connection refused"), and two did not end within 250 s. With
#   TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (c10d rendezvous), the second attempt has a store of its own.
#   "shared: attempt 1 finds the key of attempt 0: True; same port: True"
#   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: attempt 1 finds the key of attempt 0: False; same port: False"
# Versions: torch 2.13.0 on CPU, two ranks, one agent, Python 3.11, Linux; run on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import os, sys, time
from datetime import timedelta
from torch.distributed.rendezvous import rendezvous

rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
store = next(rendezvous("env://", timeout=timedelta(seconds=60)))[0]
if attempt == "0":
    if rank == "0":
        store.set("mine", os.environ["MASTER_PORT"])
        store.wait(["heard"])
        sys.exit("rank 0 ends")
    store.wait(["mine"])
    store.set("heard", "")
    time.sleep(60)
elif rank == "0":
    found = store.check(["mine"])
    same = found and store.get("mine").decode() == os.environ["MASTER_PORT"]
    print(f"attempt 1 finds the key of attempt 0: {found}; same port: {same}", flush=True)
PY
run() {
    OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 --max-restarts 1 "$folder/case.py" \
        2> "$folder/errors"
}
shared=$(run)
apart=$(TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 run)
echo "shared: $shared"
echo "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: $apart"
[ "$shared" = "attempt 1 finds the key of attempt 0: True; same port: True" ]
[ "$apart" = "attempt 1 finds the key of attempt 0: False; same port: False" ]
echo "as described"
