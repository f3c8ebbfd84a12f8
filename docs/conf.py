"""How `sphinx-build -W -n docs site` makes the site; `.ci/docs` runs it. No network is needed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "backends"), str(ROOT / "docs" / "_site")]

os.environ.setdefault("KERAS_BACKEND", "torch")  # posenc_keras imports Keras, which asks once
import posenc  # noqa: E402

project = "posenc"
copyright = "the posenc authors"
version = release = posenc.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    # Own, of docs/_site.
    "api_pages",
    "mathml",
    "scheme_pages",
    "site_links",
]
exclude_patterns = ["_site"]
needs_sphinx = "8.0"

myst_enable_extensions = ["dollarmath"]
# Headings have the anchors that they have on GitHub, to the depth that pages link to.
myst_heading_anchors = 4
html_math_renderer = "mathml"

# A scheme's methods are described once, in PositionScheme.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
# The inventories of other projects are not vendored, so names of their types are not links; nor are
# names of posenc that are no public API: aliases for type checkers.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!posenc)[\w.]+"),
    (r"py:.*", r".*[\[\]<>].*"),  # parts of types
    (r"py:.*", r"posenc.*\.([A-Z]\w*|_\w+)"),
]
viewcode_follow_imported_members = True

html_theme = "pydata_sphinx_theme"
html_title = "posenc"
html_static_path = ["_site/static"]
html_css_files = ["posenc.css"]
html_show_sourcelink = False
html_copy_source = False
templates_path = ["_site/templates"]
html_sidebars = {"**": ["pages"]}
html_theme_options = {
    "navbar_center": [],
    "logo": {"text": "posenc"},
    "show_prev_next": False,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
pygments_style = "friendly"
