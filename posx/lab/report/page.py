"""The page of a report: one HTML file with its data, its script, and Vega-Lite inside."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import posx
from posx.errors import ConfigError, WorkdirError
from posx.lab.files.atomic import disk_errors, write_bytes
from posx.lab.report.content import content

_HERE = Path(__file__).parent


def write_report(folders: Sequence[Path], out: Path) -> int:
    """Write the report on the runs at or below `folders` to `out`. Return how many runs it shows.

    Raises:
      ConfigError: the extra `report` is not installed.
      WorkdirError: there is nothing to show, or `out` cannot be written.
    """
    _library()  # before anything takes time
    data = content(folders)
    if not data["rows"]:
        named = ", ".join(folder.name for folder in folders)
        raise WorkdirError(f"{named}: no run has results. Measure them with posx evaluate --workdir FOLDER")
    title = "posx: " + ", ".join(folder.name for folder in folders).encode(errors="replace").decode()
    write_page(title, data, "page", out)
    return sum(len(curve["runs"]) for curve in data["curves"])


def write_page(title: str, data: dict[str, Any], kind: str, out: Path) -> None:
    """Write a page of a kind, "page" or "gallery", to `out`. Raises ConfigError without the extra, WorkdirError."""
    text = page(title, data, kind, _library())
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(out, text.encode())


@functools.cache
def _library() -> str:
    """Return vega, vega-lite and vega-embed as one script."""
    try:
        import vl_convert
    except ImportError:
        raise ConfigError("posx report needs vl-convert-python. Install it: pip install 'posx[report]'") from None
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def page(title: str, data: dict[str, Any], kind: str, library: str) -> str:
    """Return the HTML of a page. The browser runs its scripts by their digests alone, and loads nothing."""
    files = ("page.css", f"{kind}.html", "common.js", f"{kind}.js")
    style, body, common, script = ((_HERE / name).read_text("utf-8") for name in files)
    scripts = [library, common + script]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; style-src {_digest(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    rows = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":  # so that no text can end the element that holds it
        rows = rows.replace(sign, f"\\u{ord(sign):04x}")
    head = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">
<meta name="generator" content="posx {html.escape(posx.__version__)}"><title>{html.escape(title)}</title>
<style>{style}</style></head>
"""
    body = body.replace("TITLE", html.escape(title), 1)
    modules = "".join(f'<script type="module">{script}</script>\n' for script in scripts)
    return f'{head}<body>\n{body}<script type="application/json" id="data">{rows}</script>\n{modules}</body></html>\n'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
