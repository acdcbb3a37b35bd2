"""``python -m accelight``: the ``accelight`` command."""

import sys

from .command import main

sys.exit(main())
