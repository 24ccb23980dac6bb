#!/usr/bin/env bash
# SIGTERM to the command `deepspeed`, as a batch system or a supervisor sends it, while two ranks run.
# Expected: The ranks end with it, as on Ctrl-C and as under torchrun.
# Seen: The command ends at once; its second launcher (deepspeed.launcher.launch) and both ranks run on. SIGTERM to that
#   second launcher would end them.
#   "the command has ended; 15 s later, 2 ranks run"
# Versions: deepspeed 0.19.8, torch 2.13.0 on CPU, Python 3.11, Linux; run on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'touch "$folder/end"; sleep 3; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/pip" install --quiet deepspeed==0.19.8
cat > "$folder/case.py" <<'PY'
import os, sys, time
folder, rank, begin = sys.argv[-1], os.environ["RANK"], time.time()
while not os.path.exists(f"{folder}/end") and time.time() - begin < 600:
    open(f"{folder}/rank{rank}", "w").write(str(time.time()))
    time.sleep(0.5)
PY
HOME=$folder "$folder/venv/bin/python" "$folder/venv/bin/deepspeed" --num_gpus 2 "$folder/case.py" "$folder" \
    > "$folder/out" 2>&1 &
command=$!
until [ -s "$folder/rank0" ] && [ -s "$folder/rank1" ]; do sleep 0.5; done
kill -TERM "$command"
wait "$command" || true
sleep 15
running=$("$folder/venv/bin/python" -c "
import sys, time
print(sum(time.time() - float(open(f'{sys.argv[1]}/rank{rank}').read()) < 5 for rank in (0, 1)))" "$folder")
echo "the command has ended; 15 s later, $running ranks run"
[ "$running" = 2 ]
echo "as described"
