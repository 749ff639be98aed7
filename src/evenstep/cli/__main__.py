"""``python -m evenstep.cli``: the same as ``evenstep``, where no script is installed."""

from . import main

main()
