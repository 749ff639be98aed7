"""``python -m evenstep.doctor``, alone or under torchrun."""

import sys

from ._command_line import main

sys.exit(main())
