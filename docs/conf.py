"""Settings of the documentation site. Build it with `sphinx-build -W docs docs/_build`."""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
#: Tutorials run `posx` and Python of this environment.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

from docs import book  # noqa: E402  (needs the path above)

project, author, copyright = "posx", "the posx developers", "the posx developers"
version = release = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build", "jupyter_execute", "catalogue.md"]  # the book of encodings has its table
default_role = "code"  # posx's docstrings write `name` for code
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_in_temp = True
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_render_markdown_format = "gfm"  # has tables
copybutton_exclude = ".linenos, .gp, .go"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # a field that a docstring lists is described once

html_theme = "sphinx_book_theme"
html_title = "posx"
html_static_path = ["_static"]
html_css_files = ["posx.css"]
html_js_files = ["sort.js"]
html_copy_source = html_show_sourcelink = False
html_theme_options = {
    "navbar_persistent": [],
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "use_download_button": False,
}


def setup(app):
    """Generate pages before Sphinx looks for them, and lead links to them."""
    book.write(Path(app.srcdir))
    app.connect("source-read", book.link)
    app.connect("autodoc-process-docstring", book.untyped, priority=400)  # before napoleon, which has 500
    app.connect("autodoc-process-docstring", book.plain)
