"""A save that replaces another is all or nothing, at every call that changes the disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_step_that_is_saved_again_is_never_lost(tmp_path):
    """Killed at any call in between, the first save is found or the second, and later this one."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tests.torch.saves", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, check=True, timeout=120, stdout=subprocess.PIPE
    )
    found = json.loads(done.stdout)

    values = [value for _, _, value in found]
    assert all(step == 7 for _, step, _ in found)
    assert values == sorted(values)
    assert {values[0], values[-1]} == {1.0, 2.0}
    assert values.count(2.0) > 2, "nothing was killed after the second was in place"
