"""Start the worker processes of one run, watch them, and leave none behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_PATIENCE_S = 5.0


class DemoFailed(RuntimeError):
    """A worker process failed; the message holds its own last words."""


class Workers:
    """The processes of one run, from ``with`` to its end.

    Args:
        run_dir: holds ``job.json``; everything the processes print goes to ``output.txt`` there.
        num_workers: how many, started by torchrun; None starts a single one without it.
    """

    def __init__(self, run_dir: Path, num_workers: int | None) -> None:
        self.run_dir = run_dir
        self.num_workers = num_workers
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Workers:
        worker = ["-m", f"{__package__}._worker", str(self.run_dir)]
        command = [sys.executable, *worker]
        if self.num_workers is not None:
            # localhost: the machine's own name need not resolve, on a laptop say.
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
            command = [sys.executable, *torchrun, f"--nproc-per-node={self.num_workers}", *worker]
        with (self.run_dir / "output.txt").open("wb") as output:
            # A session of its own: Ctrl-C reaches this process alone, which then ends the others.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # torchrun passes it on to the workers
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the workers notice and end by themselves
                self._process.wait()

    def running(self) -> bool:
        """Return whether they are still at work.

        Raises:
            DemoFailed: they ended with an error.
        """
        code = self._process.poll()
        if code:
            raise DemoFailed(_last_words(self.run_dir, code))
        return code is None


def _environment() -> dict[str, str]:
    """Return the environment of a worker: this one's, with one thread for arithmetic."""
    # The single worker too: two threads that wait for each other crawl where a core is taken.
    changed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if Path("/sys/class/net/lo").exists():
        changed["GLOO_SOCKET_IFNAME"] = "lo"  # all on this machine, whatever its name resolves to
    here = str(Path.cwd())
    if here in sys.path:  # a policy found there has to be found by the workers too
        others = os.environ.get("PYTHONPATH")
        changed["PYTHONPATH"] = os.pathsep.join((here, others) if others else (here,))
    return {**os.environ, **changed}


def _last_words(run_dir: Path, code: int) -> str:
    """Return what the worker that failed first had to say, and where the rest can be read."""
    reports = sorted(run_dir.glob("failed-rank*.txt"), key=lambda path: path.stat().st_mtime_ns)
    output = run_dir / "output.txt"
    if reports:
        rank = reports[0].stem.removeprefix("failed-rank")
        said = f"worker {rank} failed first:\n\n{_error_of(reports[0].read_text())}"
        output = reports[0]
    else:
        lines = output.read_text(errors="replace").strip().splitlines()
        said = "the workers ended with an error:\n\n" + "\n".join(lines[-15:])
    return f"{said}\n\nMore in {output} (exit code {code})"


def _error_of(trace: str) -> str:
    """Return the error at the end of a traceback, without the indented lines that lead to it."""
    lines = trace.strip().splitlines()
    last_frame = max((i for i, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return "\n".join(lines[last_frame + 1 :]) or lines[-1]
