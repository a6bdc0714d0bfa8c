"""Dynamo's offline replay of a trace: one worker, real arrival times, device tier alone.

    python dynamo_replay.py TRACE --backend vllm --page-size 16 --device-tokens 1048576

Timed is the call that replays, by CPU time; not the import of the package.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

from dynamo._core import run_mocker_trace_replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--backend", choices=["vllm", "sglang"], default="vllm")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device-tokens", type=int, default=1_048_576)
    options = parser.parse_args()

    engine = {
        "backend": options.backend,
        "block_size": options.page_size,
        "num_gpu_blocks": options.device_tokens // options.page_size,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
    }
    began = time.process_time()
    replayed = run_mocker_trace_replay(
        [str(options.trace)], extra_engine_args={"engine": engine}, trace_block_size=512
    )
    took = time.process_time() - began
    summary = dict(replayed.summary)
    print(
        json.dumps(
            {
                "cpu_seconds": took,
                "resident_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "hit_ratio": summary["first_admission_prefix_cache_reused_ratio"],
            }
        )
    )


main()
