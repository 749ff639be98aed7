"""Training that others wrote, watched from outside: who waits for whom, and why.

``evenstep watch -- torchrun ... train.py``, or ``python -m evenstep.watch``. Nothing in the script
changes, and nothing in what it computes.
"""

__all__: list[str] = []
