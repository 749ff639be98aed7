"""What ranks do in the real runs of ``benchmarks.causes``."""

import numpy as np
import pytest

from benchmarks._cause_script import Played

NUM_STEPS = 6


class Counting(Played):
    """Counts what is compiled instead of sleeping."""

    num_compiled = 0

    def _compiled(self, graph, inputs):
        self.num_compiled += 1
        return graph.forward


@pytest.mark.slow
def test_a_run_after_another_one_compiles_in_each_step_too(tmp_path):
    """Its shapes were compiled before, and the entries of both count up to the limit."""
    drawn = {name: np.ones((NUM_STEPS, 1)) for name in ("collected_us", "compiled_us")}
    drawn |= {name: np.ones((NUM_STEPS, 1)) for name in ("size", "pages")}
    drawn |= {"own_us": np.ones((NUM_STEPS, 1, 7)), "exchange_us": np.ones(NUM_STEPS)}
    for _ in range(4):
        played = Counting(drawn, 0, tmp_path / "none")
        for step in range(NUM_STEPS):
            played.step = step
            played.compile()

        assert played.num_compiled == NUM_STEPS
