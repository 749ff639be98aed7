"""Balanced training to look at: ``evenstep demo``.

A small GPT learns the sources of Python's standard library, first with equal shares and then
balanced. ``_worker.py`` is the training script; ``_run_demo.py`` launches it, watches and draws.
"""

__all__: list[str] = []
