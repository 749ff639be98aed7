"""The one thread that issues what goes over the wire, in the order in which buckets come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import final

import torch

from ._bucket_job import BucketJob
from ._pipeline import Pipeline


@final
class Issuer:
    """Takes buckets from a queue and runs them; ends at the first error, which every bucket gets.

    Args:
        pipeline: runs them.
        prepare: called with each bucket before its first chunk.
        on_error: turns an error into the one to raise, and makes the others' waits end too.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        prepare: Callable[[BucketJob], None],
        on_error: Callable[[BaseException], BaseException],
    ) -> None:
        self._pipeline = pipeline
        self._prepare = prepare
        self._on_error = on_error
        self._queue: SimpleQueue[BucketJob | None] = SimpleQueue()
        self._lock = threading.Lock()  # between a bucket that comes and an error that ends all
        self._job: BucketJob | None = None
        self._stream: torch.cuda.Stream | None = None
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="evenstep-reduce", daemon=True)
        self._thread.start()

    def put(self, job: BucketJob) -> None:
        """Have ``job`` run.

        Raises:
            BaseException: what ended an earlier one.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            self._queue.put(job)

    def close(self) -> None:
        """End the thread once all that was put is done or failed. May be called again."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._job = job
                self._wait_for_device(job)
                self._prepare(job)
                self._pipeline.run(job)
                self._job = None
            self._drain()
        except BaseException as error:  # to be raised by what waits for a bucket
            self._fail(self._on_error(error))

    def _next(self) -> BucketJob | None:
        while True:
            try:
                return self._queue.get(block=self._pipeline.is_empty)
            except Empty:
                self._pipeline.go_on()

    def _drain(self) -> None:
        while not self._pipeline.is_empty:
            self._pipeline.go_on()

    def _wait_for_device(self, job: BucketJob) -> None:
        """Order what this thread does on a device behind the backward, and behind that alone."""
        if job.ready is None or job.gradients is None:
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(job.gradients.device)  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(self._stream)  # of this thread
        self._stream.wait_event(job.ready)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = error
            jobs = [*self._pipeline.jobs(), *([self._job] if self._job is not None else [])]
            while not self._queue.empty():
                job = self._queue.get_nowait()
                jobs += [job] if job is not None else []
        for job in dict.fromkeys(jobs):
            job.done(error)
