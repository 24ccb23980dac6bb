"""Write the table of worlds in docs/gpu.md anew, from the records: `python -m tools.gpu_table`.

With `--check` nothing is written: exit code 1 if the table is not what the records say.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tools import ROOT
from tools.records import RECORDS, RecordError, find_records
from tools.worlds_table import worlds_table


def filled(page: str, table: str, name: str = "worlds") -> str:
    """A page with the table between the markers of its name.

    Raises:
        ValueError: it has not exactly one pair of them.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"(?<={begin}\n).*?(?={end})", re.S)
    if len(pattern.findall(page)) != 1:
        raise ValueError(f"there is no one place between {begin} and {end}")
    return pattern.sub(lambda _: f"{table}\n", page)


def main() -> int:
    """The exit code: 0, 1 for a stale table, 2 for a page or a record that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the table is stale")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md")
    parser.add_argument("--records", type=Path, default=RECORDS, help="default: benchmarks/records")
    given = parser.parse_args()
    try:
        page = given.page.read_text()
        wanted = filled(page, worlds_table(find_records(given.records)))
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"{given.page}: {error}", file=sys.stderr)
        return 2
    if given.check:
        if page != wanted:
            print(f"{given.page}: the table of worlds is stale: python -m tools.gpu_table", file=sys.stderr)
        return int(page != wanted)
    given.page.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
