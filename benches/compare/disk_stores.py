"""Disk stores: Terrace's, redb, foyer and plain direct IO."""

from __future__ import annotations

import os
import subprocess
import sys

from bench import REPOSITORY, Bench, Figures, best, output_of
from report import Bar, Group, Report, times

# By their names in benches/disk-stores, whose lockfile has their versions.
STORES = {
    "direct": "plain direct IO, no index",
    "terrace": "Terrace, synced at the end",
    "foyer": "foyer 0.22, never synced",
    "terrace-durable": "Terrace, every 64 objects durable",
    "redb": "redb 4.4, every 64 objects durable",
}
# The counterpart of each, with the same guarantees.
ALIKE = {"direct": "terrace", "foyer": "terrace", "redb": "terrace-durable"}


def build(bench: Bench) -> str:
    """Builds the program, which contains all stores."""
    target = bench.target / "disk-stores"
    subprocess.run(
        ["cargo", "build", "--release", "--locked"],
        cwd=REPOSITORY / "benches" / "disk-stores",
        check=True,
        env={**os.environ, "CARGO_TARGET_DIR": str(target)},
    )
    return str(target / "release" / "disk-stores")


def figures_of(row: dict) -> Figures:
    """Seconds per 10^9 bytes that were found again, so that losing objects gains nothing."""
    found_gb = row["read"]["objects_found"] * row["object_bytes"] / 1e9
    return {
        "put": row["write"]["seconds"] / found_gb,
        "get": row["read"]["seconds"] / found_gb,
        "put_cpu": row["write"]["cpu_seconds"] / found_gb,
        "get_cpu": row["read"]["cpu_seconds"] / found_gb,
        "written": row["write"]["written_bytes"] / found_gb / 1e9,
        "survived": row["after_kill"]["objects_found"] / row["killed_objects"],
    }


def compare(bench: Bench) -> Report:
    """Compares rates of puts and gets, and resource use."""
    gib = "0.125" if bench.quick else "1"
    command = [build(bench), "--path", str(bench.work), "--gib", gib, "--stores", ",".join(STORES), "--json"]
    measured: dict[tuple[int, str], list[Figures]] = {}
    for number in range(bench.rounds):
        print(f"round {number + 1} of {bench.rounds}: stores on the disk", file=sys.stderr, flush=True)
        for row in output_of(command):
            measured.setdefault((row["object_bytes"], row["store"]), []).append(figures_of(row))

    rows, groups = [], []
    for object_bytes in sorted({object_bytes for object_bytes, _ in measured}):
        size = f"{object_bytes >> 10} KiB"
        bars: dict[str, list[Bar]] = {"put": [], "get": []}
        for store, who in STORES.items():
            row = [size, who]
            for kind in bars:
                figures = best(measured[object_bytes, store], kind)
                ours = best(measured[object_bytes, ALIKE.get(store, store)], kind)
                gb_s = 1 / figures[kind]
                row += [f"{gb_s:.2f}", times(figures[kind] / ours[kind]), f"{figures[kind + '_cpu']:.2f}"]
                bars[kind].append(Bar(who, gb_s, f"{gb_s:.2f} GB/s", store.startswith("terrace")))
            rounds = measured[object_bytes, store]
            row.append(f"{max(figures['written'] for figures in rounds):.2f}")
            row.append(f"{min(figures['survived'] for figures in rounds):.1%}")
            rows.append(row)
        groups += [Group(f"{kind}, objects of {size}", bars[kind]) for kind in bars]
    kinds = [[f"{kind}, GB/s", "time beside Terrace", "CPU s a GB"] for kind in ("put", "get")]
    return Report(
        title="Stores on a disk: speed (more is better)",
        run=f"{gib} GiB of objects for each store and size.",
        header=["object", "", *kinds[0], *kinds[1], "written per byte", "found after a kill"],
        rows=rows,
        groups=groups,
    )
