#!/usr/bin/env bash
# The number of threads of two ranks on one machine, started by `fabric run` and by Fabric().launch().
# Expected: Each rank has its share of the cores, either way.
# Seen: Fabric().launch() gives each rank cores / 2 threads; `fabric run` sets OMP_NUM_THREADS to all cores for each of
#   them. On two cores, two ranks then compute with four threads.
#   "2 cores: OMP_NUM_THREADS of fabric run 2, of launch 1"
# Versions: lightning-fabric 2.6.6, click 8.5.1, torch 2.13.0 on CPU, Python 3.11, Linux, two cores or more;
#   run on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset OMP_NUM_THREADS
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lightning-fabric==2.6.6 click==8.5.1 torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import os, sys
from lightning_fabric import Fabric

if len(sys.argv) > 2:
    Fabric(accelerator="cpu", devices=2, strategy="ddp").launch()
open(f"{sys.argv[1]}{os.environ['LOCAL_RANK']}", "w").write(os.environ["OMP_NUM_THREADS"])
PY
"$folder/venv/bin/fabric" run --accelerator cpu --devices 2 --strategy ddp "$folder/case.py" "$folder/run" 2> "$folder/e1"
"$folder/venv/bin/python" "$folder/case.py" "$folder/launch" itself > "$folder/o2" 2> "$folder/e2"
sleep 2  # rank 1 may end after rank 0
cores=$(nproc)
echo "$cores cores: OMP_NUM_THREADS of fabric run $(cat "$folder/run0"), of launch $(cat "$folder/launch0")"
[ "$(cat "$folder/run0")" = "$cores" ] && [ "$(cat "$folder/run1")" = "$cores" ]
[ "$(cat "$folder/launch0")" = $((cores / 2)) ] && [ "$(cat "$folder/launch1")" = $((cores / 2)) ]
echo "as described"
