"""The lines that `make test` runs, as a share of those that the whole suite runs. Run by
coverage.sh, on what it left in a folder."""

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path


def lines_of_c(folder):
    """{file: the lines that ran}, of whatever kernel set and type."""
    ran = defaultdict(set)
    for path in folder.glob("*.gz"):
        for file in json.loads(gzip.decompress(path.read_bytes()))["files"]:
            if file["file"].startswith("csrc/"):
                ran[file["file"]].update(line["line_number"] for line in file["lines"]
                                         if line["count"])
    return ran


def lines_of_python(report):
    files = json.loads(report.read_text())["files"]
    return {"mha/" + name.partition("package/mha/")[2]: set(file["executed_lines"])
            for name, file in files.items()}


def main(folder):
    build, shares = Path(folder), {}
    for kind, quick, whole in (
            ("csrc", lines_of_c(build / "quick.gcov"), lines_of_c(build / "all.gcov")),
            ("mha", lines_of_python(build / "quick.json"), lines_of_python(build / "all.json"))):
        count = sum(map(len, whole.values()))
        missing = {name: lines - quick.get(name, set()) for name, lines in whole.items()}
        left = sum(map(len, missing.values()))
        shares[kind] = 1 - left / count
        print(f"{kind}: make test runs {count - left:,} of the {count:,} lines that the whole suite"
              f" runs: {shares[kind]:.1%}")
        for name, lines in sorted(missing.items(), key=lambda item: -len(item[1]))[:8]:
            if lines:
                print(f"    {name}: {len(lines)} more, as line {min(lines)}")
    sys.exit(min(shares.values()) < 0.95)


if __name__ == "__main__":
    main(*sys.argv[1:])
