"""Compares Terrace with its peers; `scripts/compare` starts it. See docs/benchmarks.md."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import disk_stores
import prefix_caches
import replays
import schedulers
from bench import REPOSITORY, Bench
from environments import NotInstalled
from report import Report, between_markers, svg

COMPARISONS: dict[str, Callable[[Bench], Report]] = {
    "sglang": prefix_caches.compare,
    "tokenspeed": schedulers.compare,
    "dynamo": replays.compare,
    "disk-stores": disk_stores.compare,
}
DOCUMENT = REPOSITORY / "docs" / "benchmarks.md"


def machine() -> str:
    """Describes the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rust = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout.split()[1:2]
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, Linux {platform.release()}, Rust {''.join(rust)}, "
        f"load {load:.1f} before the run"
    )


def write(name: str, report: Report, measured_on: str, folder: Path) -> None:
    """Writes the table into the document, and the plot beside it."""
    plot = folder / f"{name}.svg"
    plot.parent.mkdir(parents=True, exist_ok=True)
    plot.write_text(svg(report))
    content = f"{report.markdown()}\n\n{measured_on}\n\n![{report.title}](benchmarks/{name}.svg)"
    DOCUMENT.write_text(between_markers(DOCUMENT.read_text(), name, content))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/compare", description=__doc__.partition(";")[0] + ".")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"{', '.join(COMPARISONS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="a short try: small workloads, one round, documents stay")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a further trace, in the format of Mooncake's")
    options = parser.parse_args()
    for name in options.peers:
        if name not in COMPARISONS:
            parser.error(f"there is no peer {name!r}; there are {', '.join(COMPARISONS)}")

    target = Path(os.environ.get("CARGO_TARGET_DIR", REPOSITORY / "target")).resolve()
    bench = Bench(target, options.quick, options.trace and options.trace.resolve())
    bench.work.mkdir(parents=True, exist_ok=True)
    date = time.strftime("%Y-%m-%d", time.gmtime())
    best_of = "one round" if bench.rounds == 1 else f"best of {bench.rounds} rounds in turns"
    measured_on = f"Measured on {date}, {best_of}: {machine()}."
    if os.getloadavg()[0] > (os.cpu_count() or 1) / 2:
        print("This machine has other things to do: figures of this run are not worth much.", file=sys.stderr)
    failed = []
    for name in options.peers or COMPARISONS:
        try:
            report = COMPARISONS[name](bench)
        except NotInstalled as error:
            failed.append(f"{name} cannot be compared with, because it cannot be installed. {error}")
            continue
        except (OSError, RuntimeError, ValueError, KeyError, subprocess.CalledProcessError) as error:
            failed.append(f"{name} could not be measured. {type(error).__name__}: {error}")
            continue
        print(f"## {report.title}\n\n{report.markdown()}\n\n{measured_on}\n", flush=True)
        if options.quick:
            (bench.work / f"{name}.svg").write_text(svg(report))
        else:
            write(name, report, measured_on, DOCUMENT.parent / "benchmarks")
    for line in failed:
        print(f"scripts/compare: {line}", file=sys.stderr)
    return 1 if failed else 0


sys.exit(main())
