"""The embedded corpus: source code of the running interpreter's standard library. Real text, no download.

The list of modules is fixed, so the corpus changes only with the Python version (its digest is stored with results).
Left out: tests, generated tables (`encodings`, `pydoc_data`), vendored and removed packages.
"""

import platform
import sysconfig
from pathlib import Path

from posx.data.text_files import Files
from posx.errors import DataError

MODULES = """
    _collections_abc _pydatetime _pydecimal _pyio _strptime abc argparse ast asyncio base64 bdb bisect bz2 calendar
    cmd code codecs codeop collections compileall concurrent configparser contextlib copy copyreg csv ctypes curses
    dataclasses datetime dbm difflib dis doctest email enum filecmp fileinput fnmatch fractions ftplib functools
    getopt getpass gettext glob graphlib gzip hashlib heapq hmac html http imaplib importlib inspect ipaddress json
    linecache locale logging lzma mailbox mimetypes modulefinder multiprocessing netrc ntpath numbers operator
    optparse os pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats pty
    py_compile pyclbr pydoc queue quopri random re reprlib runpy sched secrets selectors shelve shlex shutil smtplib
    socket socketserver sqlite3 ssl statistics string stringprep subprocess symtable sysconfig tabnanny tarfile
    tempfile textwrap threading timeit tkinter token tokenize tomllib trace traceback tracemalloc turtle types typing
    unittest urllib uuid venv warnings wave weakref webbrowser wsgiref xml xmlrpc zipapp zipfile zipimport zoneinfo
""".split()

_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}


def stdlib_files() -> tuple[Files, tuple[str, ...]]:
    """The corpus' files, sorted, and notes on what was skipped; raises `DataError` if no source code is installed."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths: list[Path] = []
    for name in MODULES:
        if (root / f"{name}.py").is_file():
            paths.append(root / f"{name}.py")
        inside = (root / name).rglob("*.py") if (root / name).is_dir() else ()
        paths += [path for path in inside if not _SKIPPED.intersection(path.relative_to(root).parts)]
    usable = tuple(sorted(path for path in paths if _is_text(path)))
    if not usable:
        raise DataError(
            f"data.source 'stdlib': no source code of the standard library under '{root}'; "
            "name a text file or folder as data.source"
        )
    notes = (f"{len(paths) - len(usable)} empty or undecodable files skipped",) if len(usable) < len(paths) else ()
    return Files(root, usable, f"stdlib (Python {platform.python_version()})"), notes


def _is_text(path: Path) -> bool:
    try:
        return bool(path.read_bytes().decode("utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False
