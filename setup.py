"""Beside pyproject.toml: the registry's page has the README with files named where the checkout's has links to them."""

import re
from pathlib import Path

from setuptools import setup

_RELATIVE_LINK = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)]*)\)")

setup(
    long_description=_RELATIVE_LINK.sub(r"\1", Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
