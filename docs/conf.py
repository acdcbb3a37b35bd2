"""The site's settings: `make docs` builds it into `build/site`, with every warning an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelight

project = "accelight"
author = "The accelight developers"
copyright = "The accelight developers. Apache-2.0"
release = version = accelight.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "tools.docs.docstrings",
    "tools.docs.markdown_pages",
]
exclude_patterns = ["_build"]
nitpicky = True
# What other projects document is linked where their inventories can be had, and is not looked for where they cannot.
nitpick_ignore_regex = [
    ("py:.*", r"(?!accelight\b).*"),
    ("py:class", r"accelight\..*\.(T|P|R|ModuleT)"),
]  # and type variables

# Inventories of other sites need a network. The workflow that publishes the site asks for them; a build at a desk or in
# a test does not, and then names of torch, Python and Lightning stand there without a link.
if os.environ.get("ACCELIGHT_DOCS_INTERSPHINX") or os.environ.get("READTHEDOCS"):
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    }

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

autodoc_inherit_docstrings = False  # hooks that override Lightning's are Lightning's to document
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
maximum_signature_line_length = 88
python_use_unqualified_type_names = True

copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True

html_theme = "furo"
html_title = f"accelight {release}"
html_copy_source = False  # `markdown_pages` puts the Markdown beside each page instead
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "search.js")  # Sphinx opens it from where it was started
html_theme_options = {"navigation_with_keys": True}
