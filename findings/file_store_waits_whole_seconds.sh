#!/usr/bin/env bash
# FileStore.wait with a time-out that is not a number of whole seconds, for a key that nobody sets.
# Expected: it gives up after its time-out, as TCPStore does (0.1 s: 0.1 s; 1.1 s: 1.1 s).
# Seen: the time that has passed is cut to whole seconds before it is compared: 0.1 s takes 1.0 s, 1.1 s takes 2.0 s.
# Versions: torch 2.13.0 on CPU, Python 3.11, Linux; run on 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/case.py" <<'PY'
import sys, time
from datetime import timedelta
import torch.distributed as dist

stores = {"FileStore": dist.FileStore(sys.argv[1], 1), "TCPStore": dist.TCPStore("127.0.0.1", 0, None, True)}
took = {}
for name, store in stores.items():
    for asked in (0.1, 1.1):
        begin = time.perf_counter()
        try:
            store.wait(["missing"], timedelta(seconds=asked))
        except RuntimeError:
            took[name, asked] = time.perf_counter() - begin
            print(f"{name}: {asked} s asked for, {took[name, asked]:.2f} s taken")
assert took["TCPStore", 0.1] < 0.5 and took["TCPStore", 1.1] < 1.6
assert took["FileStore", 0.1] > 0.95 and took["FileStore", 1.1] > 1.95
PY
"$folder/venv/bin/python" "$folder/case.py" "$folder/store" 2> "$folder/warnings"
echo "as described"
