"""``python -m accelight.checkpoint``: the ``accelight`` command."""

import sys

from .cli import main

sys.exit(main())
