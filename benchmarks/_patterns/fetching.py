"""Loops that differ in when they fetch a batch, and from what."""

from __future__ import annotations

from collections import deque
from itertools import cycle, islice
from queue import Queue
from threading import Thread

import torch
from torch.utils.data import DataLoader

from ._pattern import GLOBAL_BATCH_SIZE, Pattern
from ._update import loss_of, update

LONG = 9 * GLOBAL_BATCH_SIZE + 8


def plain(model, loader, optimizer, run):
    """The loop of PyTorch's tutorials."""
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step()


def prefetched_by_one(model, loader, optimizer, run):
    """The next batch is fetched before the forward of the one at hand: most home-made loaders."""
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        batch, following = following, next(batches, None)
        update(model, batch, optimizer)


def prefetched_by_three(model, loader, optimizer, run):
    """A deque is kept filled, as in flax's prefetch_to_device and many TPU loops."""
    batches = iter(loader)
    queue = deque(islice(batches, 3))
    while queue:
        queue.extend(islice(batches, 1))
        update(model, queue.popleft(), optimizer)


def _in_thread(batches, maxsize):
    """Yield batches that a thread fetches ahead into a queue; its errors are raised here."""
    queue = Queue(maxsize=maxsize)

    def fetch():
        try:
            for batch in batches:
                queue.put((batch, None))
            queue.put((None, None))
        except Exception as error:
            queue.put((None, error))

    Thread(target=fetch, daemon=True).start()
    while True:
        batch, error = queue.get()
        if error is not None:
            raise error
        if batch is None:
            return
        yield batch


def thread_with_a_queue_of_one(model, loader, optimizer, run):
    """A thread fetches the next batch while this one is trained on: double buffering."""
    for batch in _in_thread(loader, 1):
        update(model, batch, optimizer)


def thread_with_a_queue_of_four(model, loader, optimizer, run):
    """A thread fetches up to four batches ahead."""
    for batch in _in_thread(loader, 4):
        update(model, batch, optimizer)


def thread_that_moves_to_the_device(model, loader, optimizer, run):
    """prefetch_generator's BackgroundGenerator around a loop that moves batches: copies."""
    moved = ((x.clone(), y.clone()) for x, y in loader)
    for batch in _in_thread(moved, 2):
        update(model, batch, optimizer)


class _Prefetcher:
    """The order of calls of apex's data_prefetcher, with copies for `.cuda(non_blocking=True)`."""

    def __init__(self, loader):
        self.batches = iter(loader)
        self.preload()

    def preload(self):
        self.x, self.y = next(self.batches, (None, None))
        if self.x is not None:
            self.x, self.y = self.x.clone(), self.y.clone()
            self.x = self.x.sub_(0.1).div_(1.1)

    def next(self):
        x, y = self.x, self.y
        self.preload()
        return x, y


def stream_prefetcher(model, loader, optimizer, run):
    """apex's imagenet example: what the forward gets are copies, one batch behind the loader."""
    prefetcher = _Prefetcher(loader)
    x, y = prefetcher.next()
    while x is not None:
        update(model, (x, y), optimizer)
        x, y = prefetcher.next()


def one_behind(loader):
    """Yield copies of a loader's batches, each once the next one is fetched."""
    at_hand = None
    for x, y in loader:
        following = x.clone().sub_(0.1), y.clone()
        if at_hand is not None:
            yield at_hand
        at_hand = following
    yield at_hand


def prefetching_loader(model, loader, optimizer, run):
    """timm's PrefetchLoader: a generator that yields one batch behind."""
    for x, y in one_behind(loader):
        update(model, (x, y), optimizer)


def fetch_between_forward_and_backward(model, loader, optimizer, run):
    """nanoGPT: the next batch is fetched while the device is busy with the forward."""
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        loss = loss_of(model, *batch)
        batch = next(batches, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fetch_between_backward_and_step(model, loader, optimizer, run):
    """The next batch is fetched before the optimizer steps."""
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        batch = next(batches, None)
        optimizer.step()


def cycled(model, loader, optimizer, run):
    """itertools.cycle: from the second epoch on, stored batches of the first come again."""
    for batch in islice(cycle(loader), 2 * len(loader) - 1):
        update(model, batch, optimizer)


def kept_in_a_list(model, loader, optimizer, run):
    """Batches of the first epoch are cached, and the second epoch trains from the cache."""
    cache = []
    for batch in loader:
        cache.append(batch)
        update(model, batch, optimizer)
    for batch in reversed(cache):
        update(model, batch, optimizer)


def copies_kept_and_named(model, loader, optimizer, run):
    """As above with copies, which only the explicit form can tell apart."""
    cache = []
    for batch in loader:
        cache.append((batch, [tensor.clone() for tensor in batch]))
        update(model, batch, optimizer)
    for batch, copy in cache:
        with run.step(batch):
            update(model, copy, optimizer)


def one_batch_overfitted(model, loader, optimizer, run):
    """A first test of a model: `next(iter(loader))`, and many steps on that batch."""
    batch = next(iter(loader))
    for _ in range(4):
        update(model, batch, optimizer)


def peek_before_the_loop(model, loader, optimizer, run):
    """A look at one batch for shapes, then the loop."""
    x, _ = next(iter(loader))
    assert x.shape[1:] == (4,)
    for batch in loader:
        update(model, batch, optimizer)


def peek_during_the_loop(model, loader, optimizer, run):
    """`next(iter(loader))` for images to log, while the loop over the same loader runs."""
    for number, batch in enumerate(loader):
        update(model, batch, optimizer)
        if number == 1:
            shown, _ = next(iter(loader))
            assert len(shown)


def endless_iterator(model, loader, optimizer, run):
    """Training counted in steps: on StopIteration a new iterator begins."""
    batches = iter(loader)
    for _ in range(2 * len(loader) - 1):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        update(model, batch, optimizer)


def sliced(model, loader, optimizer, run):
    """`itertools.islice` for a limited number of steps, as `limit_train_batches` does."""
    for epoch in range(2):
        for batch in islice(loader, len(loader) - 1 - epoch):
            update(model, batch, optimizer)


def left_and_begun_anew(model, loader, optimizer, run):
    """A loop that is left by break, and another."""
    for number, batch in enumerate(loader):
        update(model, batch, optimizer)
        if number == 2:
            break
    for batch in loader:
        update(model, batch, optimizer)


def _with_progress(batches):
    """Yield what there is, as tqdm does."""
    bar = []
    for batch in batches:
        yield batch
        bar.append("#")


def with_a_progress_bar(model, loader, optimizer, run):
    """`for i, batch in enumerate(tqdm(loader))`."""
    for _, batch in enumerate(_with_progress(loader)):
        update(model, batch, optimizer)


def zipped_with_a_plain_loader(model, loader, optimizer, run):
    """`zip(loader, other)`, where the other gives all ranks the same."""
    factors = DataLoader(torch.linspace(1, 2, len(loader)).double(), batch_size=1)
    for (x, y), factor in zip(loader, factors, strict=True):
        optimizer.zero_grad()
        (factor * loss_of(model, x, y)).backward()
        optimizer.step()


def two_loaders_in_turn(model, loaders, optimizer, run):
    """One data set after the other in each epoch."""
    for _ in range(2):
        for loader in loaders:
            for batch in loader:
                update(model, batch, optimizer)


def two_loaders_at_once(model, loaders, optimizer, run):
    """Semi-supervised training: `zip(labelled, unlabelled)`, both prepared."""
    for (x, y), (u, _) in zip(*loaders, strict=False):
        optimizer.zero_grad()
        (loss_of(model, x, y) + (model(u) ** 2).mean()).backward()
        optimizer.step()


def reshuffled(model, loader, optimizer, run):
    """`loader.sampler.set_epoch(epoch)` before each epoch."""
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            update(model, batch, optimizer)


PATTERNS = (
    Pattern(plain),
    Pattern(prefetched_by_one, num_samples=LONG, ahead=True),
    Pattern(prefetched_by_three, num_samples=LONG, ahead=True),
    Pattern(thread_with_a_queue_of_one, num_samples=2 * LONG, ahead=True),
    Pattern(thread_with_a_queue_of_four, num_samples=2 * LONG, ahead=True),
    Pattern(thread_that_moves_to_the_device, num_samples=2 * LONG, ahead=True),
    Pattern(stream_prefetcher, num_samples=LONG, ahead=True),
    Pattern(prefetching_loader, num_samples=LONG, ahead=True),
    Pattern(fetch_between_forward_and_backward, num_samples=LONG, ahead=True),
    Pattern(fetch_between_backward_and_step),
    Pattern(cycled, timed=False),
    Pattern(kept_in_a_list, timed=False),
    Pattern(copies_kept_and_named, timed=False),
    Pattern(one_batch_overfitted, ahead=True, timed=False),
    Pattern(peek_before_the_loop),
    Pattern(peek_during_the_loop),
    Pattern(endless_iterator, loader={"shuffle": True}),
    Pattern(sliced),
    Pattern(left_and_begun_anew),
    Pattern(with_a_progress_bar),
    Pattern(zipped_with_a_plain_loader),
    Pattern(two_loaders_in_turn, num_loaders=2),
    Pattern(two_loaders_at_once, num_loaders=2, remedy="one loader of both data sets"),
    Pattern(reshuffled, loader={"sampler": "distributed"}),
)
