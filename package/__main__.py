"""``python -m accelight``: the ``accelight`` command."""

import sys

from .checkpoint.cli import main

sys.exit(main())
