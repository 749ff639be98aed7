"""``python -m evenstep.watch``: for clusters, where no console script is at hand."""

import sys

from ._start_watch import main

main(sys.argv[1:])
