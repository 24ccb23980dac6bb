#!/usr/bin/env bash
# `import nbformat` in an environment that has jsonschema's extra "format-nongpl", as every JupyterLab does:
#   jupyter_events requires it.
# Expected: No more than the import of a few modules, with or without the extra.
# Seen: jsonschema from 4.25 on imports rfc3987_syntax if it is installed. That builds parsers of addresses by lark, at
#   import: about 0.9 s of CPU time in each process that imports nbformat, nbclient, papermill or nbval, none of which
#   has an address to check. jsonschema 4.24 does not. The check counts the grammars that are built, not seconds.
#   "jsonschema 4.26.0: 39 parsers built by import nbformat", "jsonschema 4.24.0: 0 parsers built by import nbformat"
# Versions: nbformat 5.11.1, jsonschema 4.26.0 and 4.24.0, rfc3987-syntax 1.1.0, lark 1.3.1, Python 3.11, Linux;
#   run on 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat > "$folder/case.py" <<'PY'
import sys
from importlib.metadata import version

import lark

built, before = [], lark.Lark.__init__
lark.Lark.__init__ = lambda self, *args, **settings: built.append(self) or before(self, *args, **settings)
import nbformat

print(f"jsonschema {version('jsonschema')}: {len(built)} parser{'s' * (len(built) != 1)} built by import nbformat")
assert len(built) == int(sys.argv[1])
PY
for each in "4.26.0 39" "4.24.0 0"; do
    read -r version parsers <<< "$each"
    "$folder/venv/bin/pip" install --quiet nbformat==5.11.1 "jsonschema[format-nongpl]==$version" rfc3987-syntax==1.1.0 lark==1.3.1
    "$folder/venv/bin/python" "$folder/case.py" "$parsers"
done
echo "as described"
