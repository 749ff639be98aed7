"""One worker: runs the cases it is told to, and writes what came of each to a file of its own.

python worker.py FOLDER CASE...
"""

import gc
import importlib
import json
import sys
import time

# Keras loads them where it finds them, for a third of a worker's start; no case uses them.
sys.modules |= dict.fromkeys(("matplotlib", "pandas", "sklearn"))

from common import CASES, FOLDER, TASK  # noqa: E402


def main():
    for module in ("fits", "loops", "endings", "faults"):
        importlib.import_module(module)
    gc.freeze()  # TensorFlow is no garbage: looking through it takes a tenth of all cases' time
    for name in sys.argv[2:]:
        began_s = time.monotonic()
        found = CASES[name]()
        print(f"worker {TASK}: {name} took {time.monotonic() - began_s:.1f} s", flush=True)
        (FOLDER / f"{name}{TASK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
