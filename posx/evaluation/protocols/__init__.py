"""Protocols of evaluation, one file each: which tokens are scored, and with how much context.

A stream is tokens [n + 1]: the first is context only (the end-of-document token before the text), the other n are the
targets. Every protocol scores the same targets at every length.
"""

from __future__ import annotations

from posx.config import EvalConfig
from posx.errors import ConfigError, nearest
from posx.evaluation.protocols.base import Protocol, Row
from posx.evaluation.protocols.nonoverlapping import Nonoverlapping
from posx.evaluation.protocols.per_position import PerPosition
from posx.evaluation.protocols.sliding import Sliding

#: The registry: names, in rows and settings, and what they stand for.
PROTOCOLS: dict[str, type[Protocol]] = {cls.name: cls for cls in (Nonoverlapping, Sliding, PerPosition)}


def protocol_class(name: str) -> type[Protocol]:
    """The protocol of a name, or of the literature's letter for it. Raises ConfigError for one that is not known."""
    letters = {cls.letter: cls for cls in PROTOCOLS.values()}
    found = PROTOCOLS.get(name) or letters.get(name.upper())
    if found is None:
        known = [*PROTOCOLS, *letters]
        raise ConfigError(f"protocol {name!r} is unknown; {nearest(name, known)}known: {', '.join(known)}")
    return found


def run_protocols(config: EvalConfig, train_len: int, longest: int = 0) -> list[tuple[Protocol, tuple[int, ...]]]:
    """Each protocol that a run's settings name, with its lengths.

    The targets are those of windows of up to `longest` tokens, and at least of all that the settings speak of.
    """
    longest = max(longest, longest_window(config, train_len))
    found = map(protocol_class, config.protocols)
    return [(cls.of_run(config, train_len, longest), cls.lengths_of(config, train_len)) for cls in found]


def rows_owed(config: EvalConfig, train_len: int) -> int:
    """How many rows a run's settings ask for."""
    return sum(len(protocol.owed(lengths)) for protocol, lengths in run_protocols(config, train_len))


def longest_window(config: EvalConfig, train_len: int) -> int:
    """The longest window that a run's settings speak of, whether or not its protocol is among those asked for."""
    return max(n for cls in PROTOCOLS.values() for n in cls.lengths_of(config, train_len))


def problems(config: EvalConfig, train_len: int) -> list[str]:
    """What of a run's settings is wrong for the protocols that they name, one line each."""
    found: list[str] = []
    known: list[type[Protocol]] = []
    for name in config.protocols:
        try:
            cls = protocol_class(name)
        except ConfigError as error:
            found.append(f"eval.protocols: {error}")
        else:
            found += [] if config.problems() else cls.problems(config, train_len)
            found += [f"eval.protocols={','.join(config.protocols)} names {cls.name} twice"] if cls in known else []
            known.append(cls)
    return found


__all__ = [
    "PROTOCOLS", "Nonoverlapping", "PerPosition", "Protocol", "Row", "Sliding", "longest_window", "problems",
    "protocol_class", "rows_owed", "run_protocols",
]  # fmt: skip
