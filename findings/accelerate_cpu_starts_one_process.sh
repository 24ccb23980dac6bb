#!/usr/bin/env bash
# accelerate launch --cpu --num_processes 2, on a machine with two cores.
# Expected: Two processes, or a line that says why not.
# Seen: One process, with MASTER_ADDR and MASTER_PORT but neither RANK nor WORLD_SIZE, and no word about it: the list of
#   defaults that it prints leaves --num_processes out, because it was given. With --multi_gpu instead, on a machine
#   without a GPU, there are two processes.
#   "--cpu: 1 process(es), WORLD_SIZE None"; "--multi_gpu: 2 process(es), WORLD_SIZE 2"
# Versions: accelerate 1.15.0, torch 2.13.0 on CPU, Python 3.11, Linux; run on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export HOME=$folder CUDA_VISIBLE_DEVICES=
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import os, sys
open(f"{sys.argv[1]}.{os.getpid()}", "w").write(str(os.environ.get("WORLD_SIZE")))
PY
for how in --cpu --multi_gpu; do
    "$folder/venv/bin/accelerate" launch "$how" --num_processes 2 "$folder/case.py" "$folder/seen$how" 2> "$folder/err$how"
    seen=("$folder/seen$how".*)
    echo "$how: ${#seen[@]} process(es), WORLD_SIZE $(cat "${seen[0]}")"
done > "$folder/all"
cat "$folder/all"
[ "$(cat "$folder/all")" = "--cpu: 1 process(es), WORLD_SIZE None
--multi_gpu: 2 process(es), WORLD_SIZE 2" ]
[ "$(grep -c num_processes "$folder/err--cpu")" = 0 ]
echo "as described"
