"""Training over parameter servers whose links change: `sudo python -m benchmarks.servers`.

The evaluation of *Adaptive Load Balancing for Parameter Servers* (ZTE Communications, 2023), as far
as it is known: four workers train a classifier of digits with 8 MB of gradients, of which each
takes 50 ms. All links are redrawn from 20 to 155 Mbit/s again and again. Three more hosts sum the
gradients (dedicated), or the workers do so themselves (collocated). Every contestant trains a
model of its own over the same links: shares that are equal, all on one server, as hashing by name
puts one large tensor, the paper's rule and evenstep's, which follow the links, and the best
shares by a planner that is told the links. Linux and root only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from benchmarks._common import Row, main
from benchmarks._network_changing import NUM_SERVERS, Race, raced
from benchmarks._network_lab import no_lab

NAMES = ("knowing", "optimal", "proportional", "equal", "hash-to-one")
TRAINING = Race(NAMES, num_elements=2_000_000, num_chunks=16, compute_s=0.05)


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """Train over links that change, with servers of both kinds."""
    if (missing := no_lab()) is not None:
        yield missing
        return
    yield from raced(TRAINING, options)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add how often links change, and which servers."""
    parser.add_argument("--seeds", type=int, default=1, help="of the links")
    parser.add_argument("--every-s", type=float, default=120.0, help="each has of a draw of links")
    parser.add_argument("--redraws", type=int, default=2, help="of each seed, the first included")
    parser.add_argument("--kind", choices=NUM_SERVERS, help="of servers, one of both")


if __name__ == "__main__":
    main(__doc__, rows, add_options)
