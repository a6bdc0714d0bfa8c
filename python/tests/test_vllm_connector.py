"""The vLLM connector with a simulated engine and device: the blocks that are saved and loaded, the
times, and the accesses to the engine's memory. With the real engine: tests/engines/vllm."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import fake_vllm
import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")
fake_vllm.install()

from terrace_kv.adapters import open_store  # noqa: E402
from terrace_kv.transfers import Transfers  # noqa: E402
from terrace_kv.vllm import copies, scheduler_side  # noqa: E402
from terrace_kv.vllm.blocks import Progress, Run, Steps, keys_of  # noqa: E402
from terrace_kv.vllm.lineage import Lineage  # noqa: E402
from terrace_kv.vllm.scheduler_side import SchedulerSide  # noqa: E402
from terrace_kv.vllm.worker_side import WorkerSide  # noqa: E402

ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
TYPES = ["bfloat16", "uint8", "float8_e4m3fn"]
SIZES = {"L": 3, "B": 40, "H": 2, "N": 4, "C": 8}
TOKENS = SIZES["N"]


class FakeEvent:
    def __init__(self, device: FakeDevice, *, passed: bool) -> None:
        self.device, self.passed = device, passed

    def query(self) -> bool:
        self.device.pump()
        return self.passed


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.queue: deque[tuple[Callable[[], None], FakeEvent, FakeEvent]] = deque()

    def run(self, work: Callable[[], None], after: Any) -> FakeEvent:
        done = FakeEvent(self.device, passed=False)
        self.queue.append((work, after, done))
        return done


class FakeDevice:
    """A device whose streams run work only after the events that it waits for, and as late as the
    test permits. While the engine's own stream is busy, no marked point of its work has passed."""

    def __init__(self) -> None:
        self.is_busy = self.is_paused = False
        self.held: list[Any] = []
        self.threads: set[str] = set()
        self.begun = 0
        self._marked: list[FakeEvent] = []
        self._streams: list[FakeStream] = []
        self._turn = threading.RLock()

    def enter(self) -> None:
        self.threads.add(threading.current_thread().name)

    def mark(self) -> FakeEvent:
        event = FakeEvent(self, passed=not self.is_busy)
        self._marked.append(event)
        return event

    def hold(self, event: Any) -> None:
        self.held.append(event)

    def stream(self) -> FakeStream:
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def become_idle(self) -> None:
        self.is_busy = False
        for event in self._marked:
            event.passed = True

    def pump(self) -> None:
        with self._turn:
            for stream in self._streams:
                if stream.queue and not self.is_paused and stream.queue[0][1].passed:
                    work, _, done = stream.queue.popleft()
                    self.begun += 1
                    work()
                    done.passed = True


class Engine:
    """The KV cache of one rank: its memory in some order, and its layers as vLLM registers them."""

    def __init__(self, order: str = "LBHNC", dtype: str = "uint8", device: str = "cpu") -> None:
        self.dtype = getattr(torch, dtype)
        memory = torch.zeros([SIZES[each] for each in order], dtype=torch.uint8, device=device)
        memory = memory.repeat_interleave(self.dtype.itemsize, -1).view(self.dtype)
        self.kv = memory.permute([order.index(each) for each in "LBHNC"])
        self.layers = {f"layer {at}": self.kv[at] for at in range(SIZES["L"])}
        self.block_bytes = self.kv[:, 0].numel() * self.dtype.itemsize

    def content(self, seed: int) -> torch.Tensor:
        """Fills the device with pseudo-random bytes."""
        dice = torch.Generator().manual_seed(seed)
        shape = [*self.kv.shape[:-1], SIZES["C"] * self.dtype.itemsize]
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=dice).to(self.kv.device).view(self.dtype)

    def fill(self, seed: int) -> None:
        self.kv.copy_(self.content(seed))

    def bytes_of(self, block: int) -> bytes:
        """The expected object: the block's layers in order."""
        return self.kv[:, block].contiguous().cpu().view(torch.uint8).numpy().tobytes()


class Config:
    """The parts of an engine's configuration that both sides read."""

    namespace = b"n" * 16
    in_engine = 1000
    is_windowed = False

    def __init__(self, block_bytes: int, store: dict[str, Any], *, staging: int = 8, ranks: int = 1, is_async: bool = True) -> None:
        self.bytes, self.staging_pages, self.ranks, self.is_async = block_bytes, staging, ranks, is_async
        self.tokens = TOKENS
        self._store = store

    def open(self) -> Any:
        return open_store(self._store, object_bytes=self.bytes)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    # Few blocks per copy, so that there are many copies.
    monkeypatch.setattr(copies, "BOUNCE_BYTES", 2048)


NUMBER = itertools.count()


@pytest.fixture
def store() -> dict[str, Any]:
    # Unique settings: stores with equal settings are shared within a process.
    return {"store": "memory", "capacity": (16 << 20) + 4096 * next(NUMBER)}


class Worker:
    """A rank."""

    def __init__(self, config: Config, engine: Engine, rank: int = 0, *, is_real: bool = False) -> None:
        self.device = FakeDevice()
        self.engine, self.config, self.rank = engine, config, rank
        self.side = WorkerSide(config, rank, copies.device_of if is_real else lambda _: self.device)  # type: ignore[arg-type]
        self.side.register(engine.layers)

    def step(self, steps: Steps, write: Callable[[], None] = lambda: None) -> tuple[set[str], set[str], Progress | None]:
        """Runs a step as vLLM's model runner does."""
        self.side.begin(steps)
        self.side.load(steps)
        write()
        self.side.save(steps)
        return (*self.side.ended(), self.side.progress(steps))

    def until(self, wanted: Callable[[], bool]) -> None:
        for _ in range(4000):
            if wanted():
                return
            time.sleep(0.0025)
        raise AssertionError("it does not end")

    def done(self, kind: str = "put") -> int:
        return int(self.side._transfers.stats()[kind]["objects"])


@pytest.fixture
def workers() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*arguments: Any, **more: Any) -> Worker:
        made.append(Worker(*arguments, **more))
        return made[-1]

    yield make
    for worker in made:
        worker.device.is_paused = False
        worker.device.become_idle()
        worker.side.close()


def run(blocks: list[int], request: str = "a", first: int = 0, salt: str = "") -> Run:
    """Blocks named by their numbers in a request."""
    names = [f"{salt} block {first + at}".encode().ljust(32) for at in range(len(blocks))]
    return Run(request, first, names, blocks)


def stored(config: Config, wanted: Run, rank: int = 0) -> list[bytes | None]:
    """The content of the store."""
    shared = config.open()
    transfers = Transfers(shared.store, config.namespace)
    memory = torch.zeros((len(wanted.blocks), config.bytes), dtype=torch.uint8)
    region = transfers.register(memory, config.bytes)
    got = transfers.get(keys_of(wanted.hashes, rank), region.pages(range(len(wanted.blocks))))
    found = [bytes(row.numpy().tobytes()) if ok else None for row, ok in zip(memory, got.ok)]
    transfers.close()
    shared.close()
    return found


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("place", devices())
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_what_a_step_writes_is_saved_after_it_and_loaded_into_any_layout(
    order: str, dtype: str, place: str, store: dict[str, Any], workers: Callable[..., Worker]
) -> None:
    is_real = place == "cuda"
    engine = Engine(order, dtype, place)
    config = Config(engine.block_bytes, store)
    worker = workers(config, engine, is_real=is_real)
    saved = run([31, 4, 15, 9, 2, 6, 5, 35, 8, 30, 1, 0])
    content = engine.content(seed=1)

    def compute() -> None:
        if is_real:
            sleep: Any = torch.cuda._sleep
            sleep(200_000_000)
            engine.kv.copy_(content)
        worker.device.is_busy = True

    since = time.monotonic()
    worker.step(Steps(saves=[saved]), compute)
    took = time.monotonic() - since
    time.sleep(0.02)
    assert worker.done() == 0 and worker.device.begun == 0, "nothing is read before the step has ended"
    assert took < 0.05 or not is_real, "and no step waits for that"
    if not is_real:
        engine.kv.copy_(content)
        worker.device.become_idle()
    worker.until(lambda: worker.done() == len(saved.blocks))
    assert stored(config, saved) == [engine.bytes_of(block) for block in saved.blocks]

    other = Engine(ORDERS[(ORDERS.index(order) + 1) % 6], dtype, place)
    second = workers(config, other, is_real=is_real)
    to = list(range(20, 20 + len(saved.blocks)))
    second.step(Steps(loads=[Run("b", saved.first, saved.hashes, to)]))
    second.until(second.side._mover._is_idle)  # type: ignore[union-attr]
    assert [other.bytes_of(block) for block in to] == [engine.bytes_of(block) for block in saved.blocks]
    untouched = set(range(SIZES["B"])) - set(to)
    assert not any(any(other.bytes_of(block)) for block in untouched)


def test_f82_a_step_with_more_blocks_than_staging_memory_is_saved_whole(
    store: dict[str, Any], workers: Callable[..., Worker]
) -> None:
    engine = Engine()
    engine.fill(1)
    config = Config(engine.block_bytes, store, staging=4)
    worker = workers(config, engine)
    saved = run(list(range(40)))
    worker.step(Steps(saves=[saved]))
    worker.until(lambda: worker.done() == 40)
    assert stored(config, saved) == [engine.bytes_of(block) for block in range(40)]


def test_loads_of_more_than_staging_memory_need_no_further_step(store: dict[str, Any], workers: Callable[..., Worker]) -> None:
    engine, other = Engine(), Engine()
    engine.fill(1)
    config = Config(engine.block_bytes, store, staging=4)
    worker, second = workers(config, engine), workers(config, other)
    worker.step(Steps(saves=[run(list(range(40)))]))
    worker.until(lambda: worker.done() == 40)
    second.step(Steps(loads=[run(list(range(40)), "b")]))
    second.until(second.side._mover._is_idle)  # type: ignore[union-attr]
    assert [other.bytes_of(block) for block in range(40)] == [engine.bytes_of(block) for block in range(40)]
    assert second.side.ended()[1] == {"b"} and not second.side.failed_blocks()


def test_staging_memory_is_not_used_again_before_its_copy_has_ended(
    store: dict[str, Any], workers: Callable[..., Worker]
) -> None:
    engine, other = Engine(), Engine()
    engine.fill(1)
    config = Config(engine.block_bytes, store, staging=4)
    worker, second = workers(config, engine), workers(config, other)
    worker.device.is_paused = second.device.is_paused = True
    worker.step(Steps(saves=[run(list(range(40)))]))
    time.sleep(0.05)
    assert worker.done() == 0, "what was not copied is not stored"
    worker.device.is_paused = False
    worker.until(lambda: worker.done() == 40)
    assert stored(config, run(list(range(40)))) == [engine.bytes_of(block) for block in range(40)]
    second.step(Steps(loads=[run(list(range(40)), "b")]))
    second.until(lambda: second.done("get") == 2)
    time.sleep(0.05)
    assert second.done("get") == 2, "both pages for loads still wait for their copies"
    second.device.is_paused = False
    second.until(second.side._mover._is_idle)  # type: ignore[union-attr]
    assert [other.bytes_of(block) for block in range(40)] == [engine.bytes_of(block) for block in range(40)]


def test_blocks_are_not_written_before_the_step_that_used_them_has_ended(
    store: dict[str, Any], workers: Callable[..., Worker]
) -> None:
    engine = Engine()
    engine.fill(1)
    config = Config(engine.block_bytes, store)
    worker = workers(config, engine)
    worker.step(Steps(saves=[run([3])]))
    worker.until(lambda: worker.done() == 1)
    before = engine.bytes_of(7)
    worker.device.is_busy = True
    worker.step(Steps(loads=[run([7], "b")]))
    worker.until(lambda: worker.done("get") == 1)
    time.sleep(0.02)
    assert engine.bytes_of(7) == before and not worker.side.ended()[1]
    worker.device.become_idle()
    worker.until(lambda: worker.side.ended()[1] == {"b"})
    assert engine.bytes_of(7) == engine.bytes_of(3)


def test_blocks_of_a_preempted_request_are_not_read_any_more(
    store: dict[str, Any], workers: Callable[..., Worker]
) -> None:
    engine = Engine()
    engine.fill(1)
    config = Config(engine.block_bytes, store, staging=16)
    worker = workers(config, engine)
    blocks_max = worker.side._mover._saving.blocks_max  # type: ignore[union-attr]
    worker.device.is_paused = True
    worker.step(Steps(saves=[run(list(range(40)))]))
    worker.until(lambda: len(worker.device._streams[0].queue) == 2)
    over = worker.step(Steps(abandoned={"a"}))[2]
    assert len(worker.device.held) == 2, "the next step waits for copies that have begun"
    worker.device.is_paused = False
    worker.until(worker.side._mover._is_idle)  # type: ignore[union-attr]
    assert worker.done() == 2 * blocks_max, "those that have not begun are left out"
    worker.side.ended()
    rest = worker.side.progress(Steps())
    assert over is not None and rest is not None and over.over["a"] + rest.over["a"] == 40


def test_an_ended_request_keeps_its_blocks_until_they_are_copied(
    store: dict[str, Any], workers: Callable[..., Worker]
) -> None:
    engine = Engine()
    engine.fill(1)
    config = Config(engine.block_bytes, store, staging=4)
    worker = workers(config, engine)
    worker.device.is_paused = True
    worker.step(Steps(saves=[run(list(range(10)))]))
    for _ in range(3):
        assert worker.step(Steps(leaving={"a"}))[0] == set()
        time.sleep(0.01)
    worker.device.is_paused = False
    worker.until(lambda: worker.step(Steps())[0] == {"a"})
    worker.until(lambda: worker.done() == 10)


def test_failed_mover_blocks_no_request(
    store: dict[str, Any], workers: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    config = Config(engine.block_bytes, store)
    worker = workers(config, engine)

    def broken(*_: Any) -> Any:
        raise RuntimeError("the device has gone")

    monkeypatch.setattr(worker.side._mover._saving, "to_staging", broken)  # type: ignore[union-attr]
    sent, received, lost = set(), set(), set()
    for number in range(1, 500):
        steps = Steps(number=number)
        if number == 1:
            steps = Steps(number=number, saves=[run([1, 2, 3])], leaving={"a"}, loads=[run([5], "b")])
        elif number == 2:
            steps = Steps(number=number, loads=[run([6], "c")])
        # The mover may fail during any step, including the first.
        ended = worker.step(steps)
        sent |= ended[0]
        received |= ended[1]
        lost |= worker.side.failed_blocks()
        if sent == {"a"} and received == {"b", "c"}:
            break
        time.sleep(0.005)
    assert sent == {"a"} and received == {"b", "c"} and lost == {5, 6}


class Request:
    """A request, as the scheduler sees it."""

    def __init__(self, name: str, blocks: int, salt: str = "") -> None:
        self.request_id = name
        self.block_hashes = [f"{salt} block {at}".encode().ljust(32) for at in range(blocks)]
        self.num_tokens, self.num_computed_tokens = blocks * TOKENS + 1, 0
        self.skip_reading_prefix_cache = False


class Pair:
    """A scheduler and its workers, connected as by vLLM's scheduler."""

    def __init__(self, workers: Callable[..., Worker], store: dict[str, Any], **more: Any) -> None:
        self.engines = [Engine() for _ in range(more.get("ranks", 1))]
        for rank, engine in enumerate(self.engines):
            engine.fill(1 + rank)
        self.config = Config(self.engines[0].block_bytes, store, **more)
        self.workers = [workers(self.config, engine, rank) for rank, engine in enumerate(self.engines)]
        self.lineage = Lineage("a model")
        self.scheduler = SchedulerSide(self.config, self.lineage)  # type: ignore[arg-type]
        self.tables: dict[str, list[int]] = {}
        self.left: set[str] = set()
        self.received: dict[str, int] = {}
        self.lost: set[int] = set()
        self.steps = Steps()

    def step(self, tokens: dict[Any, int] | None = None, preempted: set[str] | None = None) -> Steps:
        """Computes the given number of tokens of each request."""
        scheduled = {request.request_id: count for request, count in (tokens or {}).items()}
        new = [SimpleNamespace(req_id=each.request_id, num_computed_tokens=each.num_computed_tokens) for each in tokens or ()]
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens=scheduled,
            preempted_req_ids=preempted,
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (self.tables[name],)),
        )
        self.steps = steps = self.scheduler.next_step(output)
        for request, count in (tokens or {}).items():
            request.num_computed_tokens += count
        progress: Progress | None = None
        left: dict[str, int] = {}
        for worker in self.workers:
            sent, received, told = worker.step(steps)
            self.lost |= worker.side.failed_blocks()
            for name in sent:
                left[name] = left.get(name, 0) + 1
            for name in received:
                self.received[name] = self.received.get(name, 0) + 1
            if told is not None:
                progress = told if progress is None else progress.aggregate(told)
        self.left |= set(left)
        self.scheduler.ended(progress, left)
        return steps

    def until(self, wanted: Callable[[], bool]) -> None:
        for _ in range(2000):
            if wanted():
                return
            self.step()
            time.sleep(0.005)
        raise AssertionError("it does not end")

    def match(self, request: Request, computed: int = 0) -> int:
        found, _ = self.scheduler.matched(request, computed)
        while found is None:
            time.sleep(0.002)
            found, _ = self.scheduler.matched(request, computed)
        return found

    def has(self, request: Request) -> int:
        """The number of leading blocks that the store has on all ranks."""
        numbers = list(range(len(request.block_hashes)))
        names = self.lineage.names(request.block_hashes)
        there = [stored(self.config, Run("", 0, names, numbers), rank) for rank in range(self.config.ranks)]
        return next((at for at in numbers if any(of[at] is None for of in there)), len(numbers))


@pytest.fixture
def pair(workers: Callable[..., Worker], store: dict[str, Any]) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**more: Any) -> Pair:
        made.append(Pair(workers, store, **more))
        return made[-1]

    yield make
    for each in made:
        each.scheduler.close()


def begin(pair: Pair, request: Request, table: list[int], external: int = 0) -> None:
    pair.tables[request.request_id] = table
    pair.scheduler.on_new_request(request)
    pair.scheduler.allocated(request, table, external)


def test_f82_all_blocks_of_a_long_prompt_are_saved_by_all_ranks(pair: Callable[..., Pair]) -> None:
    both = pair(staging=4, ranks=2)
    request = Request("a", 36)
    begin(both, request, list(range(36)))
    both.step({request: 36 * TOKENS})
    assert both.scheduler.finished(request, list(range(36))), "vLLM keeps the blocks meanwhile"
    both.until(lambda: both.left == {"a"})
    both.until(lambda: both.has(request) == 36)
    again = Request("b", 36)
    assert both.match(again) == 36 * TOKENS


def test_a_request_that_has_nothing_to_copy_ends_at_once(pair: Callable[..., Pair]) -> None:
    both = pair()
    request = Request("a", 2)
    begin(both, request, [0, 1])
    both.step({request: 2 * TOKENS})
    both.until(lambda: not both.scheduler._state.requests["a"].parts)
    assert not both.scheduler.finished(request, [0, 1])


def test_a_store_that_is_slower_than_the_engine_keeps_a_share_of_its_blocks(pair: Callable[..., Pair]) -> None:
    both = pair(staging=4)
    both.config.in_engine = 80
    both.workers[0].device.is_paused = True
    kept = []
    for number in range(4):
        table = list(range(10 * number, 10 * number + 5))
        request = Request(str(number), 5, str(number))
        begin(both, request, table)
        both.step({request: 5 * TOKENS})
        kept.append(both.scheduler.finished(request, table))
        assert both.scheduler._state.steps.abandoned == (set() if kept[-1] else {str(number)})
    assert kept == [True, True, False, False], "an eighth of 80 blocks"
    assert both.scheduler._skipped == 10
    both.workers[0].device.is_paused = False
    both.until(lambda: both.left == {"0", "1"})
    # The engine still has them cached. A request that finds them there saves them.
    late = Request("late", 5, "3")
    late.num_computed_tokens = 4 * TOKENS
    begin(both, late, list(range(30, 35)))
    both.step({late: TOKENS})
    both.until(lambda: both.has(Request("", 5, "3")) == 5)


def test_running_requests_wait_a_moment_for_copies_and_no_longer(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_side, "SHORTAGE_PATIENCE_S", 0.02)
    both = pair(staging=4)
    both.workers[0].device.is_paused = True
    assert not both.scheduler.is_waiting_for_blocks()
    request = Request("a", 8)
    begin(both, request, list(range(8)))
    both.step({request: 8 * TOKENS})
    assert both.scheduler.finished(request, list(range(8)))
    assert both.scheduler.is_waiting_for_blocks() and not both.step().abandoned
    time.sleep(0.03)
    assert both.scheduler.is_waiting_for_blocks() and both.step().abandoned == {"a"}
    both.workers[0].device.is_paused = False
    both.until(lambda: both.left == {"a"})
    assert not both.scheduler.is_waiting_for_blocks() and both.scheduler._skipped == 8


def test_failed_saves_are_retried(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_side, "RETRY_INTERVAL_S", 0.05)
    both = pair()
    transfers = both.workers[0].side._transfers
    drain = transfers.drain
    fails = [True]

    def failing() -> Any:
        return [
            one._replace(codes=b"\x01\xff" + one.codes[2:], error="no") if fails[0] and one.kind == "put" else one
            for one in drain()
        ]

    monkeypatch.setattr(transfers, "drain", failing)
    request = Request("a", 6)
    begin(both, request, list(range(6)))
    both.step({request: 4 * TOKENS})
    both.until(lambda: both.scheduler._state.requests["a"].saved == 1)
    assert not both.step({request: TOKENS}).saves, "not at once"
    fails[0] = False
    time.sleep(0.06)
    [again] = both.step({request: TOKENS}).saves
    assert (again.first, again.blocks) == (1, [1, 2, 3, 4, 5])


def test_failed_loads_are_saved_after_computing(pair: Callable[..., Pair]) -> None:
    both = pair()
    first = Request("a", 6)
    begin(both, first, list(range(6)))
    both.step({first: 6 * TOKENS})
    both.until(lambda: both.has(first) == 6)
    shared = both.config.open()
    Transfers(shared.store, both.config.namespace).remove(keys_of(both.lineage.names(first.block_hashes[2:3]), 0))
    second = Request("b", 6)
    begin(both, second, list(range(10, 16)), external=5 * TOKENS)
    both.step()
    both.until(lambda: both.received == {"b": 1})
    assert both.lost == {12}
    second.num_computed_tokens = 2 * TOKENS
    [saved] = both.step({second: 4 * TOKENS}).saves
    assert saved.blocks == [12, 13, 14, 15]
    both.until(lambda: both.has(first) == 6)
    shared.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_computed_from_failed_loads_are_not_saved(
    ranks: int, pair: Callable[..., Pair]
) -> None:
    """If steps wait for their loads, a step goes on with the blocks that arrived; and only one rank
    knows which did not."""
    both = pair(ranks=ranks, is_async=False, staging=16)
    first = Request("a", 3)
    begin(both, first, list(range(3)))
    both.step({first: 3 * TOKENS})
    both.until(lambda: both.has(first) == 3)
    shared = both.config.open()
    Transfers(shared.store, both.config.namespace).remove(keys_of(both.lineage.names(first.block_hashes[1:2]), ranks - 1))
    second = Request("b", 6)
    begin(both, second, list(range(10, 16)), external=3 * TOKENS)
    second.num_computed_tokens = 3 * TOKENS
    assert not both.step({second: 3 * TOKENS}).saves
    assert both.lost == {11}
    second.num_computed_tokens = TOKENS
    [saved] = both.step({second: 5 * TOKENS}).saves
    assert saved.blocks == [11, 12, 13, 14, 15]
    shared.close()


def test_what_a_preempted_request_has_not_saved_is_saved_when_it_comes_back(pair: Callable[..., Pair]) -> None:
    both = pair(staging=4)
    both.workers[0].device.is_paused = True
    request = Request("a", 8)
    begin(both, request, list(range(8)))
    both.step({request: 8 * TOKENS})
    request.num_computed_tokens = 0
    assert both.step(preempted={"a"}).abandoned == {"a"}
    both.tables["a"] = list(range(20, 28))
    [saved] = both.step({request: 8 * TOKENS}).saves
    assert saved.blocks == list(range(20, 28)) and saved.first == 0
    both.workers[0].device.is_paused = False
    both.until(lambda: both.has(request) == 8)


def preempt_while_saving(both: Pair) -> Request:
    """Returns a request that loses its blocks while two of its eight are being saved."""
    both.workers[0].device.is_paused = True
    request = Request("a", 8)
    begin(both, request, list(range(8)))
    both.step({request: 8 * TOKENS})
    both.workers[0].until(lambda: len(both.workers[0].device._streams[0].queue) == 2)
    request.num_computed_tokens = 0
    return request


def test_a_request_that_is_preempted_and_aborted_is_not_copied_any_more(pair: Callable[..., Pair]) -> None:
    """Others reuse its blocks from the next step on."""
    both = pair(staging=4)
    request = preempt_while_saving(both)
    both.scheduler.finished(request, [])
    assert both.step(preempted={"a"}).abandoned == {"a"}
    both.workers[0].device.is_paused = False
    both.until(both.workers[0].side._mover._is_idle)  # type: ignore[union-attr]
    assert both.has(request) == 2, "only what was being copied"


def test_a_request_that_loads_again_after_preemption_may_be_aborted(pair: Callable[..., Pair]) -> None:
    """vLLM frees blocks of such a request when they have been received, and must not get a report
    that they were sent as well."""
    both = pair(staging=4)
    request = preempt_while_saving(both)
    both.step(preempted={"a"})
    assert both.scheduler._state.requests["a"].parts
    both.scheduler.allocated(request, list(range(20, 28)), 8 * TOKENS)
    both.step()
    assert not both.scheduler.finished(request, list(range(20, 28)))


def test_a_block_that_a_window_has_left_behind_is_not_saved_late(pair: Callable[..., Pair]) -> None:
    both = pair(staging=4)
    both.config.is_windowed = True
    both.workers[0].device.is_paused = True
    request = Request("a", 8)
    begin(both, request, list(range(8)))
    both.step({request: 4 * TOKENS})
    both.tables["a"] = [39, 39, 2, 3, 4, 5, 6, 7]
    assert both.step({request: TOKENS - 1}).abandoned == {"a"}


class Pool:
    """The engine's own cache."""

    def __init__(self, names: list[bytes]) -> None:
        self.names, self.looks = set(names), 0

    def get_cached_block(self, name: bytes, groups: list[int]) -> Any:
        self.looks += 1
        return [object()] if name in self.names else None


def test_only_what_the_engine_lacks_is_moved_to_memory(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair(ranks=2)
    transfers = both.scheduler._transfers
    asked: list[tuple[int, Any]] = []
    touched: list[int] = []
    submit, touch = transfers.submit_exists, transfers.touch

    def watched_submit(keys: list[bytes], **more: Any) -> int:
        asked.append((len(keys), more))
        return submit(keys, **more)

    def watched_touch(keys: list[bytes], **more: Any) -> None:
        touched.append(len(keys))
        touch(keys, **more)

    monkeypatch.setattr(transfers, "submit_exists", watched_submit)
    monkeypatch.setattr(transfers, "touch", watched_touch)
    request = Request("a", 1000)
    pool = Pool(request.block_hashes[:600])
    both.scheduler.bind_pool(pool)
    both.scheduler.on_new_request(request)
    assert asked == [(400, {"prefetch_to_memory": True, "parts": 2})] and touched == [600]
    assert pool.looks <= 11
    assert both.match(request, 600 * TOKENS) == 0
    # The engine has evicted some meanwhile.
    assert both.match(request, 500 * TOKENS) == 0 and asked[-1][0] == 500


def test_f77_nothing_of_before_a_reset_is_found_and_running_requests_save_nothing(pair: Callable[..., Pair]) -> None:
    both = pair()
    before = Request("before", 6)
    begin(both, before, list(range(6)))
    both.step({before: 6 * TOKENS})
    both.until(lambda: both.has(before) == 6)
    running = Request("running", 8, "running")
    begin(both, running, list(range(8, 16)))
    both.step({running: 4 * TOKENS})
    both.until(lambda: both.has(running) == 4)
    both.scheduler.reset()
    assert both.has(before) == 0 and both.match(Request("again", 6)) == 0
    both.step({running: 4 * TOKENS})
    assert not both.scheduler.finished(running, list(range(8, 16)))
    both.step()
    assert both.has(running) == 0, "some of it was computed before"
    # It is preempted and restarts.
    again = Request("again", 6)
    assert both.match(again) == 0
    begin(both, again, list(range(16, 22)))
    both.step({again: 6 * TOKENS})
    both.until(lambda: both.has(again) == 6)
    assert both.match(Request("later", 6)) == 6 * TOKENS


def test_f77_blocks_that_were_handed_over_before_a_reset_keep_their_names(pair: Callable[..., Pair]) -> None:
    both = pair(staging=4)
    both.workers[0].device.is_paused = True
    request = Request("a", 8)
    begin(both, request, list(range(8)))
    both.step({request: 8 * TOKENS})
    both.scheduler.reset()
    both.workers[0].device.is_paused = False
    both.until(lambda: not both.scheduler._state.requests["a"].parts)
    other = Lineage("a model")
    both.lineage = other
    both.until(lambda: both.has(request) == 8)
    assert both.match(Request("b", 8)) == 0


def test_f77_a_reset_that_connectors_are_not_told_of_is_noticed(pair: Callable[..., Pair]) -> None:
    both = pair()
    pool = SimpleNamespace(cached_block_hash_to_block={}, get_cached_block=lambda *_: None)
    both.scheduler.bind_pool(pool)
    request = Request("a", 6)
    begin(both, request, list(range(6)))
    both.step({request: 6 * TOKENS})
    both.until(lambda: both.has(request) == 6)
    assert both.match(Request("b", 6)) == 6 * TOKENS
    pool.cached_block_hash_to_block = {}
    assert both.match(Request("c", 6)) == 0


def test_requests_that_skip_the_cache_are_not_looked_up(pair: Callable[..., Pair]) -> None:
    both = pair()
    request = Request("a", 6)
    begin(both, request, list(range(6)))
    both.step({request: 6 * TOKENS})
    both.until(lambda: both.has(request) == 6)
    asked = both.scheduler._transfers.stats()["exists"]["jobs"]
    reader = Request("b", 6)
    reader.skip_reading_prefix_cache = True
    both.scheduler.on_new_request(reader)
    assert both.match(reader) == 0
    assert both.scheduler._transfers.stats()["exists"]["jobs"] == asked
