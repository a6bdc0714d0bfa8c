"""An engine in PyTorch: a small model like Llama over paged KV, on the CPU or on a GPU.

    python examples/torch_engine.py
    python examples/torch_engine.py --device cuda --dtype bfloat16 --layers 16 --hidden 2048 --heads 16 --kv-heads 4 \\
        --books 32 --book-tokens 4096 --requests 128 --running-max 8 --step-tokens-max 4096 \\
        --device-pages 2560 --host-pages 10000

It answers questions about books, which are long and do not fit on the device together: their KV is
written to the host and loaded back. Every answer is then compared with the model's answer without
pages and cache. With ``--no-cache`` each book is computed again for each question.

Two steps are in flight. While the device computes one, the next is planned and launched: its input
tokens are still on the device then, and stay there. Copies between device and host run beside the
steps, and a step may be launched before the pages that it needs are back: it waits on the device,
unless ``--no-overlap`` is given.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from terrace_kv import Hits, Plan, Scheduler
from terrace_kv.plan import LOAD_BACK
from terrace_kv.scheduler import Tier

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelSize:
    """The size of a model."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    vocabulary: int = 1024

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


class Model:
    """A decoder like Llama's, with random weights."""

    def __init__(self, size: ModelSize, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.size = size
        generator = torch.Generator().manual_seed(seed)

        def weight(outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
            values = torch.randn(outputs, inputs, generator=generator) * (gain / math.sqrt(inputs))
            return values.to(device, dtype)

        hidden, kv = size.hidden, size.kv_heads * size.head_dim
        self.embedding = weight(size.vocabulary, hidden, math.sqrt(hidden))
        # Queries and keys are large, so that attention selects single tokens: an average over a
        # whole book would hardly show a wrong page.
        self.layers = [
            {
                "query": weight(hidden, hidden, 2.0),
                "key": weight(kv, hidden, 2.0),
                "value": weight(kv, hidden),
                "output": weight(hidden, hidden),
                "gate": weight(3 * hidden, hidden),
                "up": weight(3 * hidden, hidden),
                "down": weight(hidden, 3 * hidden),
            }
            for _ in range(size.layers)
        ]
        self.head = weight(size.vocabulary, hidden)
        self.frequencies = 10_000.0 ** (-torch.arange(0, size.head_dim, 2, device=device) / size.head_dim)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last layer's output for concatenated tokens of any sequences. ``attend`` gets a
        layer's number and its queries, keys and values, and returns the heads' outputs; it
        selects the visible tokens."""
        size = self.size
        angles = positions[:, None].float() * self.frequencies
        rotation = angles.cos()[:, None], angles.sin()[:, None]
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            y = F.rms_norm(x, (size.hidden,))
            query = rotate((y @ layer["query"].T).view(-1, size.heads, size.head_dim), rotation)
            key = rotate((y @ layer["key"].T).view(-1, size.kv_heads, size.head_dim), rotation)
            value = (y @ layer["value"].T).view(-1, size.kv_heads, size.head_dim)
            x = x + attend(number, query, key, value).flatten(1) @ layer["output"].T
            y = F.rms_norm(x, (size.hidden,))
            x = x + (F.silu(y @ layer["gate"].T) * (y @ layer["up"].T)) @ layer["down"].T
        return F.rms_norm(x, (size.hidden,))

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of the next token."""
        return (hidden @ self.head.T).float()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """The rotary embedding of queries or keys."""
    cos, sin = rotation
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@dataclass(frozen=True)
class Group:
    """Rows of a step that attend together: a chunk of a prompt, or all decodes."""

    first_token: int
    rows: int
    #: Tokens of each row.
    tokens: int
    #: The device pages that each row attends to.
    pages: Tensor
    #: Added to the scores: minus infinity for invisible keys.
    mask: Tensor


@dataclass
class Step:
    """A step that was launched and not reported yet."""

    number: int
    producers: npt.NDArray[np.uint64]
    #: Rows of the producers.
    rows: npt.NDArray[np.intp]
    #: A token per row, on the host.
    tokens: Tensor
    #: Event of their arrival. On the CPU work is synchronous, without events.
    ended: torch.cuda.Event | None


@dataclass(frozen=True)
class Request:
    """A question."""

    number: int
    prompt: list[int]
    max_new_tokens: int


@dataclass
class Answer:
    """An answer."""

    tokens: list[int]
    hits: Hits


class Engine:
    """Runs requests until they end."""

    def __init__(
        self,
        model: Model,
        *,
        page_size: int,
        device_pages: int,
        host_pages: int,
        running_max: int,
        step_tokens_max: int,
        uses_cache: bool = True,
        overlaps: bool = True,
        stop_token: int = -1,
    ) -> None:
        self.scheduler = Scheduler(
            {
                "model": {"fingerprint": "random weights"},
                "cache": {"page_size": page_size, "device_pages": device_pages, "host_pages": host_pages},
                "batch": {"running_max": running_max, "step_tokens_max": step_tokens_max, "steps_in_flight_max": 2},
                "copies": {"load_back_overlaps": overlaps},
            }
        )
        self.model, self.page_size, self.uses_cache, self.stop_token = model, page_size, uses_cache, stop_token
        self.device = model.embedding.device
        self.is_cuda = self.device.type == "cuda"
        size, dtype = model.size, model.embedding.dtype
        # A page is one piece of memory with the KV of all layers, so that its copy is one transfer.
        # Zeroed, because attention also reads unused entries, such as the rest of a last page:
        # their weight is 0, but they must be finite.
        page = (size.layers, 2, page_size, size.kv_heads, size.head_dim)
        self.device_kv = torch.zeros((device_pages, *page), dtype=dtype, device=self.device)
        # Only copies of pinned memory are asynchronous.
        self.host_kv = torch.zeros((host_pages, *page), dtype=dtype, pin_memory=self.is_cuda)
        self.table = np.zeros((running_max, device_pages), np.int64)
        #: One for each direction.
        self.copy_streams: list[torch.cuda.Stream | None] = [None, None]
        self.copies: dict[int, torch.cuda.Event | None] = {}
        self.steps: deque[Step] = deque()
        #: Tokens chosen by the last step, one per row, on the device.
        self.chosen = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.answers: dict[int, Answer] = {}
        self.live: set[int] = set()
        self.steps_count = self.computed_tokens = 0
        self.scheduler_seconds = 0.0
        if self.is_cuda:
            self.copy_streams = [torch.cuda.Stream(self.device) for _ in range(2)]  # type: ignore[no-untyped-call]
            # cuDNN creates a plan for each new shape, and most steps here have a unique one.
            torch.backends.cuda.enable_cudnn_sdp(False)
            # The copy streams do not wait for the zeroing.
            torch.cuda.synchronize(self.device)

    # ---- the loop ----

    def serve(self, requests: Iterable[Request], alive_max: int) -> None:
        """Answers requests, at most ``alive_max`` at a time."""
        waiting = deque(requests)
        reach: Tier = "host" if self.uses_cache else "nothing"
        while waiting or self.live:
            while waiting and len(self.live) < alive_max:
                request = waiting.popleft()
                self.live.add(request.number)
                self.scheduler.submit(
                    request.number, request.prompt, request.max_new_tokens, reads=reach, writes=reach
                )
            self.turn()

    @torch.inference_mode()
    def turn(self) -> None:
        """Requests a plan, starts it, and reports ended work."""
        began = time.perf_counter()
        plan = self.scheduler.plan()
        self.scheduler_seconds += time.perf_counter() - began
        for ended in plan.ended:
            self.live.discard(ended.request)
            if ended.state != "finished":
                raise RuntimeError(f"request {ended.request} has {ended.state}: {ended.reason}")
        plan.apply_rows(self.table)
        for op, direction, device_pages, host_pages in plan.each_copy():
            self.copies[op] = self.copy(direction, device_pages, host_pages)
        has_news = self.report_copies()
        if plan.step is not None:
            self.steps.append(self.launch(plan, plan.step))
        # Two steps are in flight, or nothing can be computed before an event.
        if len(self.steps) == 2 or (plan.step is None and self.steps):
            self.report_step(self.steps.popleft())
        elif plan.step is None and self.copies:
            self.wait(next(iter(self.copies.values())))
        elif plan.is_idle and not has_news and (deadline := self.scheduler.deadline()) is not None:
            time.sleep(max(0, deadline - self.scheduler.now()) / 1e6)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Waits for an event, and reports copies as soon as they end: the scheduler measures their
        time and compares it with that of computing."""
        while not has_happened(event):
            self.report_copies()
            time.sleep(20e-6)
        self.report_copies()

    def report_step(self, step: Step) -> None:
        """Waits for a step, and reports its tokens."""
        # The load-backs that it waited for have ended too. They are reported first, so that the
        # step counts at once.
        self.wait(step.ended)
        tokens = step.tokens.numpy()[step.rows].astype(np.uint32)
        for request, token in zip(step.producers.tolist(), tokens.tolist()):
            if request not in self.answers:
                self.answers[request] = Answer([], self.scheduler.hits(request) or Hits(0, 0, 0))
            answer = self.answers[request].tokens
            # A request that stops may be part of the step behind, which is already launched.
            if self.stop_token not in answer[-1:]:
                answer.append(token)
        began = time.perf_counter()
        self.scheduler.step_done(step.number, step.producers, tokens, finished=tokens == self.stop_token)
        self.scheduler_seconds += time.perf_counter() - began

    # ---- copies ----

    def copy(
        self, direction: int, device_pages: npt.NDArray[np.uint32], host_pages: npt.NDArray[np.uint32]
    ) -> torch.cuda.Event | None:
        """Starts a copy, on the stream of its direction.

        It need not wait for steps: write-backs are of pages whose step has been reported, and so
        has ended; load-backs are to pages that no step in flight reads. The scheduler leaves both
        ends alone until the copy is reported.
        """
        stream = self.copy_streams[direction]
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for device, host in runs(device_pages, host_pages):
                if direction == LOAD_BACK:
                    self.device_kv[device].copy_(self.host_kv[host], non_blocking=True)
                else:
                    self.host_kv[host].copy_(self.device_kv[device], non_blocking=True)
        return None if stream is None else stream.record_event()

    def report_copies(self) -> bool:
        """Reports the copies that have ended; returns whether there were any."""
        over = [op for op, event in self.copies.items() if has_happened(event)]
        for op in over:
            del self.copies[op]
            self.scheduler.operation(op, "done")
        return len(over) > 0

    def await_copy(self, event: torch.cuda.Event | None) -> None:
        """Makes the next step wait for a copy on the device, without blocking this thread. The
        whole step waits, including decodes. Engines that copy layer by layer wait for each layer
        where they need it; engines that do not want decodes to wait leave ``load_back_overlaps``
        off."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    # ---- steps ----

    def launch(self, plan: Plan, number: int) -> Step:
        """Starts a step behind the one in flight, on the stream that all steps share."""
        for op in plan.prefills["waits_for"].tolist():
            self.await_copy(self.copies.get(op))
        counts = np.concatenate([plan.prefills["tokens"], plan.decodes["tokens"]]).astype(np.int64)
        slots = np.repeat(np.concatenate([plan.prefills["slot"], plan.decodes["slot"]]), counts)
        entries, places = np.divmod(plan.positions.astype(np.int64), self.page_size)
        tokens, positions = self.send(plan.tokens), self.send(plan.positions)
        pages, offsets = self.send(self.table[slots, entries]), self.send(places)
        if plan.behind is not None and len(plan.decodes) > 0:
            # Some start with tokens that the step before has not chosen yet.
            awaited = self.send(plan.decodes["input"])
            known = tokens[-len(plan.decodes) :]
            known.copy_(torch.where(awaited >= 0, self.chosen[awaited.clamp(min=0)], known))
        groups = list(self.groups(plan, positions))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = self.device_kv[:, layer, 0], self.device_kv[:, layer, 1]
            keys[pages, offsets], values[pages, offsets] = key, value
            return torch.cat([attend_pages(group, query, keys, values) for group in groups])

        hidden = self.model.hidden(tokens, positions, attend)
        # A token per row; those of incomplete prompts are dropped.
        self.chosen = self.model.logits(hidden[self.send(counts.cumsum() - 1)]).argmax(-1)
        told = torch.empty(len(counts), dtype=torch.int64, pin_memory=self.is_cuda)
        told.copy_(self.chosen, non_blocking=True)
        ended = torch.cuda.current_stream(self.device).record_event() if self.is_cuda else None
        self.steps_count += 1
        self.computed_tokens += len(plan.tokens)
        produces = np.concatenate([plan.prefills["produces_token"] > 0, np.ones(len(plan.decodes), np.bool_)])
        return Step(number, plan.producers, np.flatnonzero(produces), told, ended)

    def groups(self, plan: Plan, positions: Tensor) -> Iterator[Group]:
        """Groups of rows that attend together: each chunk of a prompt separately, and decodes as a
        batch as long as the longest."""
        together = [(prefill["slot"][None], int(prefill["tokens"]), int(prefill["start"])) for prefill in plan.prefills]
        if len(plan.decodes) > 0:
            together.append((plan.decodes["slot"], 1, int(plan.decodes["start"].max())))
        first_token = 0
        for slots, tokens, start in together:
            entries = -(-(start + tokens) // self.page_size)
            pages = self.send(self.table[slots, :entries])
            end = first_token + len(slots) * tokens
            seen = positions[first_token:end].view(len(slots), 1, tokens, 1)
            may_look = torch.arange(entries * self.page_size, device=self.device) <= seen
            mask = torch.where(may_look, 0.0, -math.inf).to(self.device_kv.dtype)
            # Once for each of the query heads that share a KV head.
            mask = mask.repeat(1, 1, self.model.size.heads // self.model.size.kv_heads, 1)
            yield Group(first_token, len(slots), tokens, pages, mask)
            first_token = end

    def send(self, array: npt.NDArray[np.generic]) -> Tensor:
        """Copies numbers to the device asynchronously."""
        tensor = torch.from_numpy(array.astype(np.int64))
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.is_cuda else tensor


def attend_pages(group: Group, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The attention of a group's queries to keys and values in pages. Query heads that share a KV
    head are treated as further queries of that head, so that keys are not duplicated."""
    rows, tokens = group.rows, group.tokens
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[2]
    query = query[group.first_token : group.first_token + rows * tokens]
    query = query.view(rows, tokens, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    key, value = (of_pages[group.pages].flatten(1, 2).transpose(1, 2) for of_pages in (keys, values))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
    out = out.reshape(rows, kv_heads, -1, tokens, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(rows * tokens, heads, head_dim)


def has_happened(event: torch.cuda.Event | None) -> bool:
    return event is None or bool(event.query())  # type: ignore[no-untyped-call]


def runs(
    device_pages: npt.NDArray[np.uint32], host_pages: npt.NDArray[np.uint32]
) -> Iterator[tuple[slice, slice]]:
    """Pages that are consecutive on both sides, to be copied at once."""
    ends = np.flatnonzero((np.diff(device_pages) != 1) | (np.diff(host_pages) != 1)) + 1
    for first, end in zip([0, *ends.tolist()], [*ends.tolist(), len(device_pages)]):
        device, host = int(device_pages[first]), int(host_pages[first])
        yield slice(device, device + end - first), slice(host, host + end - first)


@torch.inference_mode()
def agreement(model: Model, request: Request, answer: list[int]) -> tuple[float, float]:
    """The share of an answer that equals the model's own choice without pages and cache, given the
    tokens before it; and the largest difference of logits between the model's choice and a
    chosen token."""

    def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    device = model.embedding.device
    tokens = torch.tensor(request.prompt + answer, device=device)
    hidden = model.hidden(tokens[:-1], torch.arange(len(tokens) - 1, device=device), attend)
    logits = model.logits(hidden[-len(answer) :])
    less_likely = logits.amax(-1) - logits.gather(1, tokens[-len(answer) :, None])[:, 0]
    return float((logits.argmax(-1) == tokens[-len(answer) :]).float().mean()), float(less_likely.max())


def questions(arguments: argparse.Namespace) -> list[Request]:
    """Random questions about books."""
    random = np.random.default_rng(arguments.seed)
    vocabulary = arguments.vocabulary
    books = random.integers(0, vocabulary, (arguments.books, arguments.book_tokens))
    requests = []
    for number in range(arguments.requests):
        question = random.integers(0, vocabulary, arguments.question_tokens)
        prompt = np.concatenate([random.choice(books), question]).tolist()
        requests.append(Request(number, prompt, arguments.answer_tokens))
    return requests


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Questions about books, answered by a small model over paged KV.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--no-cache", action="store_true", help="compute everything anew")
    parser.add_argument("--no-overlap", action="store_true", help="launch nobody's step before their pages are back")
    sizes = ModelSize()
    numbers = {
        "layers": sizes.layers, "hidden": sizes.hidden, "heads": sizes.heads, "kv-heads": sizes.kv_heads,
        "vocabulary": sizes.vocabulary, "page-size": 16, "device-pages": 160, "host-pages": 512, "running-max": 4,
        "step-tokens-max": 1024, "books": 8, "book-tokens": 512, "requests": 40, "question-tokens": 16,
        "answer-tokens": 16, "seed": 0,
    }  # fmt: skip
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number, help=f"default {number}")
    return parser


def main(words: list[str] | None = None) -> None:
    arguments = parser().parse_args(words)
    size = ModelSize(
        arguments.layers, arguments.hidden, arguments.heads, arguments.kv_heads, arguments.vocabulary
    )
    model = Model(size, getattr(torch, arguments.dtype), torch.device(arguments.device), arguments.seed)
    engine = Engine(
        model,
        page_size=arguments.page_size,
        device_pages=arguments.device_pages,
        host_pages=arguments.host_pages,
        running_max=arguments.running_max,
        step_tokens_max=arguments.step_tokens_max,
        uses_cache=not arguments.no_cache,
        overlaps=not arguments.no_overlap,
    )
    requests = questions(arguments)
    # The first steps of a process load kernels and libraries.
    engine.serve([Request(len(requests), list(range(2 * arguments.page_size)), 4)], 1)
    engine.steps_count, engine.computed_tokens, engine.scheduler_seconds = 0, 0, 0.0

    began = time.perf_counter()
    engine.serve(requests, 2 * arguments.running_max)
    seconds = time.perf_counter() - began

    agreed = []
    for request in requests:
        answer = engine.answers[request.number]
        agreed.append(agreement(model, request, answer.tokens))
        print(
            f"request {request.number}: of {len(request.prompt)} tokens {answer.hits.device_tokens} were on device, "
            f"{answer.hits.host_tokens} on host"
        )
    asked = sum(len(request.prompt) + request.max_new_tokens for request in requests)
    answered = sum(len(engine.answers[request.number].tokens) for request in requests)
    print(f"{len(requests)} answers, {engine.computed_tokens} of {asked - len(requests)} tokens computed")
    print(f"{asked / seconds:.0f} tokens a second, {answered / seconds:.0f} of them of answers")
    print(
        f"{engine.steps_count} steps, {1e3 * seconds / engine.steps_count:.2f} ms each, "
        f"of which the scheduler took {1e3 * engine.scheduler_seconds / engine.steps_count:.3f} ms"
    )
    same, less_likely = np.mean([share for share, _ in agreed]), max(difference for _, difference in agreed)
    print(f"{100 * same:.2f} % of the answers' tokens are what the model says without pages and cache")
    # Sums in another order differ slightly. In bfloat16 that shows where two tokens are about
    # equally likely, and more so in deeper models; a missing book causes differences of 2 and more.
    if same < 1:
        print(f"the logits of the others are at most {less_likely:.3f} below")
    if model.embedding.dtype == torch.float32 and less_likely > 0.001:
        raise SystemExit("some page was wrong: rounding does not do that in float32")


if __name__ == "__main__":
    main()
