"""TokenSpeed's scheduler under decode-heavy load, as `terrace-bench steps` puts it on Terrace's.

    python tokenspeed_steps.py --running 256 --context 1024 --page-size 16 --device-pages 16384

Requests with a common beginning are admitted, and then all of them decode, step by step. Timed are the two calls that
an engine makes in each step: asking for the plan, and reporting what was computed. The plan is read as an engine reads
it, but that is not timed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import tokenspeed_scheduler as tokenspeed

CHUNK_TOKENS = 8192
# Number of idle steps after which the remaining requests count as stuck.
IDLE_STEPS_MAX = 60


@dataclass
class Took:
    """Processor time of the calls in microseconds, one of each per step."""

    plans: list[float] = field(default_factory=list)
    reports: list[float] = field(default_factory=list)


def configuration(page_size: int, device_pages: int, running: int) -> tokenspeed.SchedulerConfig:
    config = tokenspeed.SchedulerConfig()
    config.num_device_pages = device_pages
    config.num_host_pages = 0
    config.disable_l2_cache = True
    config.max_scheduled_tokens = CHUNK_TOKENS
    config.max_batch_size = running
    config.decode_input_tokens = 1
    if hasattr(config, "page_size"):
        # 0.1.0
        config.page_size = page_size
        return config
    # 0.1.42 has pages in groups of layers; a plain model has one group.
    config.prefix_granularity = page_size
    config.num_snapshot_pages = 1
    group = tokenspeed.CacheGroupConfig()
    group.group_id = "full_attention"
    group.block_granularity = page_size
    group.total_pages = device_pages
    group.attn_kind = tokenspeed.AttnKind.Full
    config.cache_groups = [group]
    return config


class Engine:
    """A simulated engine: every request gets the same token."""

    def __init__(self, config: tokenspeed.SchedulerConfig) -> None:
        self.scheduler = tokenspeed.Scheduler(config)
        # Versions with abort reasons expect reports of chunks that end within a prompt, too.
        self.reports_every_chunk = hasattr(tokenspeed, "AbortReason")

    def submit(self, prompts: dict[str, list[int]]) -> None:
        specs = []
        for name, tokens in prompts.items():
            spec = tokenspeed.RequestSpec()
            spec.request_id = name
            spec.tokens = tokens
            specs.append(spec)
        self.scheduler.submit_requests(specs)

    def step(self, took: Took) -> int:
        """Executes a plan; returns the number of requests in it."""
        began = time.process_time()
        plan = self.scheduler.next_execution_plan()
        took.plans.append(1e6 * (time.process_time() - began))
        event = tokenspeed.ExecutionEvent()
        forward = plan.forward[0] if plan.forward else None
        names = list(forward.request_ids) if forward else []
        if forward:
            prefills = forward.num_extends()
            lengths = list(forward.input_lengths)
            prompt_lengths = list(forward.prefill_lengths)
            before = list(forward.extend_prefix_lens)
            for i, name in enumerate(names):
                within_prompt = i < prefills and before[i] + lengths[i] < prompt_lengths[i]
                if not within_prompt or self.reports_every_chunk:
                    result = tokenspeed.ForwardEvent.ExtendResult()
                    result.request_id = name
                    result.tokens = [] if within_prompt else [7]
                    event.add_event(result)
        began = time.process_time()
        self.scheduler.advance(event)
        took.reports.append(1e6 * (time.process_time() - began))
        return len(names)

    def prefill(self) -> None:
        """Runs steps until all requests decode."""
        idle, took = 0, Took()
        while self.scheduler.waiting_size() + self.scheduler.prefilling_size() > 0:
            idle = 0 if self.step(took) else idle + 1
            if idle > IDLE_STEPS_MAX:
                raise SystemExit("Requests wait that are never admitted: are there enough pages?")

    def finish(self, names: list[str]) -> None:
        event = tokenspeed.ExecutionEvent()
        for name in names:
            end = tokenspeed.ForwardEvent.Finish()
            end.request_id = name
            event.add_event(end)
        self.scheduler.advance(event)
        # Ends take effect in the following steps.
        for _ in range(4):
            self.step(Took())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--device-pages", type=int, default=16384)
    parser.add_argument("--shared", type=int, default=50, help="percent of each prompt that all have in common")
    parser.add_argument("--decode-steps", type=int, default=64)
    options = parser.parse_args()

    engine = Engine(configuration(options.page_size, options.device_pages, options.running))
    dice = random.Random(1)
    draw = lambda count: [dice.randrange(1, 100_000) for _ in range(count)]
    shared_tokens = options.context * options.shared // 100 // options.page_size * options.page_size
    shared = draw(shared_tokens)
    # The shared prefix is cached before they arrive, as for Terrace.
    engine.submit({"first": shared + draw(2 * options.page_size + 1)})
    engine.prefill()
    engine.finish(["first"])
    engine.submit({f"request-{i:05}": shared + draw(options.context - shared_tokens) for i in range(options.running)})
    engine.prefill()
    took, in_all_steps = Took(), True
    for _ in range(options.decode_steps):
        in_all_steps &= engine.step(took) == options.running
    if not in_all_steps:
        raise SystemExit("Not every request was in every decode step: there are too few pages for all of them.")
    print(json.dumps({"plan_us": statistics.mean(took.plans), "advance_us": statistics.mean(took.reports)}))


main()
