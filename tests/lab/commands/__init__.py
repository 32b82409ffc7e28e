"""Helpers of the tests of commands."""

from posx.lab.progress import Meter
from tests import tiny


def refused(capsys, code: int, words: list, *wanted: str) -> str:
    """Return the one line with which a command ends. Check its exit code, and that it has all of `wanted`."""
    found, out, err = tiny.call(capsys, *words)
    assert found == code, f"exit {found}: {out} {err}"
    line = one_line(err)
    for text in wanted:
        assert text in line, line
    return line


def one_line(err: str) -> str:
    """Return the message, the last line of `err`. Lines before it are progress and never a traceback."""
    lines = err.strip().splitlines()
    assert lines and lines[-1].startswith("posx: ") and "Traceback" not in err, err
    assert sum(line.startswith("posx: ") for line in lines) == 1
    return lines[-1]


class Seen(list):
    """The reports to a bar: (activity, the part that is done)."""

    total = 0.0


def watched(monkeypatch, module) -> Seen:
    """Return the list of all later reports to the bars of `module`."""
    seen = Seen()

    class Watched(Meter):
        def __enter__(self):
            seen.total = self.total
            return super().__enter__()

        def show_waiting(self, what, seconds=None):
            super().show_waiting(what, seconds)
            seen.append((what, self.done))

        def update(self, done, facts):
            super().update(done, facts)
            seen.append((facts, done))

    monkeypatch.setattr(module, "Meter", Watched)
    return seen
