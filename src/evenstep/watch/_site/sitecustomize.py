"""What Python runs at its start in every process under a watch, as this folder is on its path.

It imports nothing but what Python has loaded anyway, and changes nothing until a process opens a
process group of torch's: then that process is watched. A ``sitecustomize`` of the user's or of the
system's runs as it would without this one.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # `typing` is not loaded yet
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_MOST_FRAMES = 64


class _WhenLoaded:
    """Calls back when modules are loaded, before anything is imported from them."""

    def __init__(self) -> None:
        self._calls: dict[str, Callable[[Any], None]] = {}

    def __call__(self, name: str, call: Callable[[Any], None]) -> None:
        """Have ``call(module)`` called when ``name`` is loaded; at once if it is there."""
        if name in sys.modules:
            call(sys.modules[name])
        else:
            self._calls[name] = call

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find nothing; but of a module that is waited for, have its loader report it."""
        call = self._calls.pop(name, None)
        if call is None:
            return None
        from importlib.util import find_spec

        spec = find_spec(name)
        loader: Any = getattr(spec, "loader", None)
        if loader is not None:
            loaded = loader.exec_module

            def exec_module(module: Any) -> None:
                loader.__dict__.pop("exec_module", None)
                loaded(module)
                _quietly(call, module)

            loader.exec_module = exec_module
        return spec


class _Watched:
    """This process: not attached to before it opens a process group."""

    def __init__(self, when_loaded: _WhenLoaded) -> None:
        self._when_loaded = when_loaded
        self._attachment: Any = None
        self._broken = False
        self.loaders: list[Any] = []  # for each, weakly, with its data set's id and its frames

    def wrap_groups(self, distributed: Any) -> None:
        """Have the process groups of a module reported."""
        from functools import wraps

        opens, closes = distributed.init_process_group, distributed.destroy_process_group

        @wraps(opens)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            result = opens(*args, **kwargs)
            _quietly(self._opened)
            return result

        @wraps(closes)
        def destroy_process_group(group: Any = None) -> Any:
            if self._attachment is not None:
                _quietly(self._attachment.group_closes, group)
            return closes(group)

        distributed.init_process_group = init_process_group
        distributed.destroy_process_group = destroy_process_group

    def note_loaders(self, dataloader: Any) -> None:
        """Have the places noted where loaders are made."""
        from functools import wraps
        from weakref import ref

        made = dataloader.DataLoader.__init__

        @wraps(made)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            made(loader, *args, **kwargs)
            if len(self.loaders) < _MOST_FRAMES:
                number = id(getattr(loader, "dataset", None))
                self.loaders.append((ref(loader), number, _frames()))

        dataloader.DataLoader.__init__ = __init__

    def _opened(self) -> None:
        if self._broken:
            return
        if self._attachment is None:
            self._broken = True  # unless all of this works
            from importlib.util import find_spec

            if find_spec("evenstep") is None:  # it is installed for another interpreter than this
                sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_HERE))))
            from evenstep.watch._attach import Attachment

            settings = os.environ["EVENSTEP_WATCH"]
            self._attachment = Attachment(settings, self._when_loaded, self.loaders, _frames)
            self._broken = False
        self._attachment.group_opens()


def _frames() -> list[tuple[str, int]]:
    """Return files and lines from the caller of the caller on, the innermost first."""
    frame: Any = sys._getframe(2)
    found: list[tuple[str, int]] = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def _quietly(call: Callable[..., None], *args: Any) -> None:
    """Call something of ours; a fault of it is reported in a line, and the training continues."""
    try:
        call(*args)
    except Exception as error:
        print(
            f"evenstep watch: off, training goes on ({type(error).__name__}: {error})\n",
            end="",  # one write, as other ranks say so at the same moment
            file=sys.stderr,
            flush=True,
        )


def _say_if_alone(watched: _Watched) -> None:
    """Say at the end of the process that was to be observed that there was nothing to see."""
    others = (
        "torch.distributed.run",  # torchrun, whose workers are the ones to see
        "accelerate.commands.launch",
        "multiprocessing.popen_spawn_posix",
    )
    has_failed = watched._broken or hasattr(sys, "last_value")
    trains = "torch" in sys.modules and not any(name in sys.modules for name in others)
    if trains and watched._attachment is None and not has_failed:
        print("evenstep watch: one process: nothing to wait for.", file=sys.stderr, flush=True)


def _begin() -> None:
    when_loaded = _WhenLoaded()
    watched = _Watched(when_loaded)
    when_loaded("torch.distributed.distributed_c10d", watched.wrap_groups)
    when_loaded("torch.utils.data.dataloader", watched.note_loaders)
    sys.meta_path.insert(0, when_loaded)
    if os.environ.get("EVENSTEP_WATCH_PROCESS") == str(os.getpid()):
        import atexit

        atexit.register(_say_if_alone, watched)


def _run_the_other() -> None:
    """Run the ``sitecustomize`` that this one stands before; where there is none, none."""
    # What `importlib` is made of: it is loaded, and `importlib.util` takes 5 ms.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    sys.path[:] = elsewhere
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)


if "EVENSTEP_WATCH" in os.environ:
    _quietly(_begin)
_run_the_other()
