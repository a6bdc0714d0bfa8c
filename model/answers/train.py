#!/usr/bin/env python3
"""Trains the built-in model on the texts of `books.py`.

Time limits the training, so the length of texts and the learning rate follow the clock. Every minute the weights are
written: `model.safetensors` in bf16 for the program, `checkpoint.pt` in f32 to continue from. `trained.json` has the
history, `model.json` the shape. It needs PyTorch and NumPy:

    train.py --seconds 560 --out FOLDER                                  on a GPU
    train.py --seconds 560 --seed 18 --rate 0.004 --resume FOLDER/checkpoint.pt --out FOLDER
                                                                         continues with all lengths, on other texts
    train.py --tiny --seconds 600 --out FOLDER                           on a CPU, to try the loop: a tiny model, short texts
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import time

START = time.monotonic()

import torch  # noqa: E402  (the clock includes the time that imports take)
import torch.nn.functional as F  # noqa: E402

import books  # noqa: E402
from llama import SHAPE, TINY, Llama, write_safetensors  # noqa: E402

LENGTHS, TOKENS_PER_STEP = [256, 512, 1024, 2048, 4096, 8192], 65_536
# Share of the time after which a length is trained on even if the one before is not learnt.
LATEST_START = [0.0, 0.12, 0.17, 0.22, 0.28, 0.36]
# Share of right answers at which a length counts as learnt.
LEARNT = 0.93
# Weight in the loss of tokens that are part of no answer. It falls to nothing early: most of them cannot be predicted.
TEXT_WEIGHT = 0.1
TEXT_WEIGHT_END = 0.25
# Every batch with such a number has the current length, so that it can be measured.
MEASURED_EVERY = 50
# Steps between two entries of the history, after the first ones, which are all in it.
HISTORY_EVERY, DENSE_HISTORY_STEPS = 500, 1000


class Texts(torch.utils.data.IterableDataset):
    """Batches without end. A batch depends on the seed, its number, and the stage of the training."""

    def __init__(self, seed, lengths, tokens_per_step, stage):
        self.seed, self.lengths, self.tokens_per_step, self.stage = seed, lengths, tokens_per_step, stage

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        number, step = (worker.id, worker.num_workers) if worker else (0, 1)
        while True:
            yield self.batch(number)
            number += step

    def batch(self, number):
        stage = self.stage.value
        choice = books.random.Random(f"length {self.seed} {number}")
        # Short texts return, so that they are not forgotten.
        is_longest = number % MEASURED_EVERY == 0 or choice.random() < 0.5
        length = self.lengths[stage if is_longest else choice.randrange(stage + 1)]
        count = max(1, self.tokens_per_step // length)
        parts = books.batch(f"text {self.seed} {number}", length, count)
        return tuple(torch.from_numpy(part) for part in parts)


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal, for parameters that are stacks of matrices."""

    def __init__(self, parameters, rate, momentum=0.95, weight_decay=0.01):
        super().__init__(parameters, {"lr": rate, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weights in group["params"]:
                state = self.state[weights]
                if not state:
                    state["momentum"] = torch.zeros_like(weights)
                state["momentum"].lerp_(weights.grad, 1 - group["momentum"])
                update = orthogonal(weights.grad.lerp(state["momentum"], group["momentum"]))
                outputs, inputs = weights.shape[1:]
                weights.mul_(1 - group["lr"] * group["weight_decay"])
                weights.add_(update.to(weights.dtype), alpha=-group["lr"] * max(1, outputs / inputs) ** 0.5)


def orthogonal(matrices, steps=5):
    """Brings all singular values of each matrix near one by a Newton-Schulz iteration of fifth order."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if is_tall else x


def whole_answers(hits, kinds, numbers):
    """Which answers are right in all of their tokens, and the kind of each; -1 for no answer. Both `[text][question]`."""
    slots = int(numbers.max()) + 2
    place = (numbers + 1).long()
    whole = torch.ones(len(numbers), slots, dtype=torch.long, device=hits.device)
    whole.scatter_reduce_(1, place, hits.long(), "amin")
    kind = torch.full_like(whole, -1).scatter_reduce_(1, place, kinds.long(), "amax")
    return whole[:, 1:].bool(), kind[:, 1:]


def shares_right(hits, kinds, numbers):
    """The share of right answers of each kind."""
    whole, kind = whole_answers(hits, kinds, numbers)
    found = {}
    for index, name in enumerate(books.KINDS):
        asked = int((kind == index).sum())
        if asked:
            found[name] = round(int((whole & (kind == index)).sum()) / asked, 4)
    return found


def learning_rate(done):
    """Warms up, stays, and falls in a line; `done` goes from 0 to 1."""
    return min(1.0, done / 0.015, max(0.0, (1.0 - done) / 0.45))


class Trainer:
    """The state of a training and its outputs."""

    def __init__(self, options):
        self.options = options
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.on_gpu = self.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        shape = TINY if options.tiny else SHAPE
        self.lengths, self.tokens_per_step = ([128], 2048) if options.tiny else (LENGTHS, TOKENS_PER_STEP)
        self.model = Llama(shape).to(self.device)
        if options.resume:
            self.model.load_state_dict(torch.load(options.resume, map_location=self.device))
        parameters = list(self.model.parameters())
        self.optimizers = [
            Muon([value for value in parameters if value.dim() == 3], options.rate),
            torch.optim.AdamW([value for value in parameters if value.dim() < 3], lr=options.rate / 5,
                              betas=(0.9, 0.98), weight_decay=0.0, fused=self.on_gpu),
        ]
        self.peak_rates = [options.rate, options.rate / 5]
        self.stage = multiprocessing.Value("i", len(self.lengths) - 1 if options.resume else 0, lock=False)
        workers = options.workers if options.workers is not None else max(0, (os.cpu_count() or 1) - 2)
        texts = Texts(options.seed, self.lengths, self.tokens_per_step, self.stage)
        extra = {"num_workers": workers, "prefetch_factor": 4} if workers else {}
        self.texts = iter(torch.utils.data.DataLoader(texts, batch_size=None, pin_memory=self.on_gpu, **extra))
        self.report = {
            "command": {name: str(value) if isinstance(value, pathlib.Path) else value
                        for name, value in vars(options).items() if name != "out"},
            "shape": shape, "lengths": self.lengths, "tokens_per_step": self.tokens_per_step,
            "device": torch.cuda.get_device_name(0) if self.on_gpu else "CPU", "torch": torch.__version__,
            "parameters": sum(value.numel() for value in parameters), "history": [],
        }

        earlier = options.resume.parent / "trained.json" if options.resume else None
        if earlier and earlier.exists():
            self.report["resumed"] = json.loads(earlier.read_text())

    def compile(self):
        """Compiles the model, where that works, and runs it once."""
        if not self.on_gpu or self.options.eager:
            return
        plain = self.model.parts
        self.model.compile()
        tokens = torch.zeros(self.tokens_per_step // 256, 256, dtype=torch.long, device=self.device)
        try:
            self.model.hidden(tokens, self.dtype).mean().backward()
        except Exception as error:  # an uncompiled model trains as well, but slower
            print(f"not compiled: {error}", flush=True)
            self.model.parts = plain
        for value in self.model.parameters():
            value.grad = None

    def save(self):
        out = self.options.out
        write_safetensors(out / "model.safetensors", self.model.tensors())
        unfinished = out / "checkpoint.part"
        torch.save(self.model.state_dict(), unfinished)
        os.replace(unfinished, out / "checkpoint.pt")
        (out / "trained.json").write_text(json.dumps(self.report, indent=1) + "\n")
        described = {"shape": self.report["shape"], "context_tokens": self.lengths[-1], "measured": None}
        (out / "model.json").write_text(json.dumps(described, indent=1) + "\n")

    def step(self, parts, done):
        """One step of the optimizers. Returns the loss on answers, and which tokens were predicted."""
        tokens, kinds, numbers = parts
        hidden = self.model.hidden(tokens, self.dtype)[:, :-1]
        logits = self.model.logits(hidden.to(self.dtype)).float()
        targets, is_answer = tokens[:, 1:], kinds[:, 1:] >= 0
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        answer_loss = (losses * is_answer).sum() / is_answer.sum().clamp(min=1)
        weight = 0.0 if self.options.resume else TEXT_WEIGHT * max(0.0, 1.0 - done / TEXT_WEIGHT_END)
        loss = answer_loss + weight * (losses * ~is_answer).mean() if weight else answer_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self.peak_rates):
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate(done)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return answer_loss.detach(), (logits.argmax(-1) == targets) | ~is_answer, numbers[:, 1:], kinds[:, 1:]

    def run(self):
        options = self.options
        self.compile()
        begin = time.monotonic() - START
        self.report["seconds_until_first_step"] = round(begin, 1)
        step, tokens_seen, saved = 0, 0, begin
        losses = torch.zeros((), device=self.device)
        while (elapsed := time.monotonic() - START) < options.seconds:
            done = (elapsed - begin) / max(options.seconds - begin, 1e-9)
            parts = tuple(part.to(self.device, torch.long, non_blocking=True) for part in next(self.texts))
            loss, hits, numbers, kinds = self.step(parts, done)
            losses += loss
            step, tokens_seen = step + 1, tokens_seen + parts[0].numel()
            if (step - 1) % MEASURED_EVERY == 0:
                right = shares_right(hits, kinds, numbers)
                line = {"seconds": round(elapsed, 1), "step": step, "tokens": tokens_seen, "length": parts[0].shape[1],
                        "answer_loss": round(float(losses) / (1 if step == 1 else MEASURED_EVERY), 5), "right": right}
                losses.zero_()
                if step < DENSE_HISTORY_STEPS or (step - 1) % HISTORY_EVERY == 0:
                    self.report["history"].append(line)
                print(json.dumps(line), flush=True)
                self.advance(parts[0].shape[1], right, done)
            if elapsed - saved > options.save_every:
                saved = elapsed
                self.save()
        self.report |= {"steps": step, "tokens": tokens_seen, "seconds_in_all": round(time.monotonic() - START, 1)}
        self.save()

    def advance(self, length, right, done):
        """Begins with the next length once this one is learnt or its time is up."""
        after = self.stage.value + 1
        if after == len(self.lengths):
            return
        found = [right.get(name, 0.0) for name in books.KINDS[:3]]
        is_learnt = length == self.lengths[after - 1] and sum(found) / len(found) > LEARNT
        if is_learnt or done > LATEST_START[after]:
            self.stage.value = after


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=560, help="time for everything, imports included; default 560")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--rate", type=float, default=0.01, help="the highest learning rate, of Muon")
    parser.add_argument("--resume", type=pathlib.Path, help="continue from this checkpoint.pt")
    parser.add_argument("--save-every", type=float, default=60, help="seconds between checkpoints")
    parser.add_argument("--workers", type=int, help="processes that make texts; default: all cores but two")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and short texts, to try the loop")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."))
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    Trainer(options).run()
