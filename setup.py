"""Beside pyproject.toml: on the registry's page the README has no plot, and names of files in the place of links."""

import re
from pathlib import Path

from setuptools import setup

_RELATIVE_IMAGE = re.compile(r"!\[[^\]]*\]\((?!https?://)[^)]*\)\n*")
_RELATIVE_LINK = re.compile(r"\[[^\]]+\]\((?!https?://|#)([^)]*)\)")

_README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    long_description=_RELATIVE_LINK.sub(r"\1", _RELATIVE_IMAGE.sub("", _README)),
    long_description_content_type="text/markdown",
)
