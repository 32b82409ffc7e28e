"""Digests of the code of a user's own encodings: all that the class reaches counts, and nothing else."""

import dataclasses
import importlib
import sys
import textwrap

import pytest

from posx.contract.sources import source_digest
from posx.encodings import Alibi, Chain, Dape, Encoding, code_of

MINE = '''
    """Two encodings and what they use."""
    import dataclasses
    import jax.numpy as jnp
    import shapes
    from posx import Encoding
    from kit import growth as grow, unused
    from kit.more import *

    SCALE = {"slope": 1.0}
    SCALE["slope"] = 0.5
    POWER, LEAST = 0.5, 1

    class Base(Encoding):
        """The base."""
        def scaled(self, d):
            return SCALE["slope"] * grow(d) ** POWER

    def bias(d):
        return 3 * d

    @dataclasses.dataclass(frozen=True)
    class Mine(Base):
        gain: float = 1.0

        def bias(self, params, q_pos, k_pos):
            """Of pairs."""
            import late
            bias = late.capped(shapes.curved(q_pos - k_pos))  # a name of its own
            return self.gain * self.scaled(bias) + offset(LEAST)

    @dataclasses.dataclass(frozen=True)
    class Other(Encoding):
        def bias(self, params, q_pos, k_pos):
            return bias(q_pos)

    def make(slope):
        @dataclasses.dataclass(frozen=True)
        class Made(Encoding):
            def bias(self, params, q_pos, k_pos):
                return slope * q_pos
        return Made

    Made = make(2.0)

    if __name__ == "__main__":
        print(Mine())
'''


@dataclasses.dataclass(frozen=True)
class Own(Encoding):
    """An encoding that is not of posx."""


FILES = {
    "mine.py": MINE,
    "kit/__init__.py": "from .inner import growth\ndef unused(x):\n    return x\n",
    "kit/inner.py": "def growth(x):\n    return x * RATE\nRATE = 2\nOTHER = 1\n",
    "kit/more.py": "def offset(x):\n    return x + 1\n",
    "shapes.py": "def curved(x):\n    return x\ndef flat(x):\n    return 0\n",
    "late.py": "def capped(x):\n    return x\n",
}


@pytest.fixture
def digest(tmp_path, monkeypatch):
    """The digest of a class of mine.py, with one text of one file replaced."""
    places = iter(range(9))

    def of(file="mine.py", old="", new="", name="Mine"):
        place = tmp_path / str(next(places))
        for path, text in FILES.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            assert old in text or path != file
            (place / path).write_text(
                textwrap.dedent(text).replace(old, new) if path == file and old else textwrap.dedent(text)
            )
        with monkeypatch.context() as only:
            only.syspath_prepend(place)
            try:
                return source_digest(getattr(importlib.import_module("mine"), name))
            finally:
                for module in [m for m in sys.modules if m.partition(".")[0] in ("mine", "kit", "shapes", "late")]:
                    del sys.modules[module]

    return of


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("mine.py", "self.gain * ", "2 * self.gain * "),  # the class itself
        ("mine.py", "gain: float = 1.0", "gain: float = 1.5"),
        ("mine.py", "grow(d) ** POWER", "grow(d)"),  # its base
        ("mine.py", "POWER, LEAST = 0.5, 1", "POWER, LEAST = 0.5, 2"),  # constants
        ("mine.py", 'SCALE["slope"] = 0.5', 'SCALE["slope"] = 0.25'),
        ("mine.py", "growth as grow", "unused as grow"),
        ("kit/inner.py", "x * RATE", "x + RATE"),  # other files, by whatever import
        ("kit/inner.py", "RATE = 2", "RATE = 3"),
        ("kit/more.py", "x + 1", "x + 2"),
        ("shapes.py", "return x", "return x * x"),
        ("late.py", "return x", "return min(x, 9)"),
    ],
)
def test_source_digest_changes_with_what_the_class_uses(digest, file, old, new):
    assert digest() != digest(file, old, new)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("mine.py", "# a name of its own", "# another comment"),
        ("mine.py", '"""Of pairs."""', '"""Of all pairs."""'),
        ("mine.py", '"""The base."""', ""),
        ("mine.py", "self.gain * self.scaled(bias)", "(self.gain\n                * self.scaled(bias))"),
        ("mine.py", "return bias(q_pos)", "return -bias(q_pos)"),  # another encoding
        ("mine.py", "return 3 * d", "return 4 * d"),  # of which a local variable has the name
        ("mine.py", "grow, unused", "grow"),
        ("mine.py", "print(Mine())", "print(Mine(2.0))"),
        ("kit/inner.py", "OTHER = 1", "OTHER = 2"),
        ("shapes.py", "return 0", "return 1"),
    ],
)
def test_source_digest_leaves_out_what_the_class_does_not_use(digest, file, old, new):
    assert digest() == digest(file, old, new)


def test_source_digest_of_a_made_class_holds_its_arguments(digest):
    assert digest(name="Made") != digest("mine.py", "make(2.0)", "make(3.0)", name="Made")
    assert digest(name="Made") != digest("mine.py", "slope * q_pos", "slope + q_pos", name="Made")


def test_source_digest_of_a_class_without_a_file():
    def typed(body):
        names = {"__name__": "typed_in"}
        exec(f"class Mine:\n    def bias(self, x):\n        return {body}\n", names)
        return source_digest(names["Mine"])

    assert typed("x * 2") == typed("x * 2") != typed("x * 3")


def test_code_of_finds_encodings_within_others_and_none_of_posx():
    name = f"{Own.__module__}:{Own.__qualname__}"
    assert code_of([Alibi(4), Chain((Alibi(4), Alibi(4)))]) == {}
    wanted = {name: source_digest(Own)}
    assert code_of([Chain((Alibi(4), Own()))]) == code_of([Dape(base=Own())]) == wanted and len(wanted[name]) == 12


def test_source_digest_follows_imports_within_methods(tmp_path, monkeypatch):
    """A relative import is found in the package of the class; a module that is not installed does no harm."""
    body = """
        class Mine:
            def bias(self, x):
                from .near import grown
                try:
                    import a_module_that_nobody_has
                except ImportError:
                    pass
                return grown(x)
    """
    digests = []
    for number, sign in enumerate("+-+"):
        package = tmp_path / f"{number}" / "packed"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "mine.py").write_text(textwrap.dedent(body))
        (package / "near.py").write_text(f"def grown(x):\n    return x {sign} 1\n")
        with monkeypatch.context() as only:
            only.syspath_prepend(package.parent)
            digests.append(source_digest(importlib.import_module("packed.mine").Mine))
            for module in [name for name in sys.modules if name.partition(".")[0] == "packed"]:
                del sys.modules[module]
    assert digests[0] == digests[2] != digests[1]


FROZEN = "import dataclasses\n@dataclasses.dataclass(frozen=True)"
SCALED = """import functools
def scaled(f):
    @functools.wraps(f)
    def g(x):
        return 1.0 * f(x)
    return g"""


@pytest.mark.parametrize(
    ("helper", "used", "old", "new"),
    [
        ("S = 1.0\ndef f(x, s=S):\n    return s * x", "helper.f(x)", "1.0", "2.0"),
        ("S = 1.0\ndef f(x, *, s=S):\n    return s * x", "helper.f(x)", "1.0", "2.0"),
        ("import types\nC = types.SimpleNamespace(s=1.0)", "helper.C.s * x", "1.0", "2.0"),
        (f"{FROZEN}\nclass C:\n    s: float\nD = C(s=1.0)", "helper.D.s", "s=1.0", "s=2.0"),
        ("class C:\n    __slots__ = ('s',)\nD = C()\nD.s = 1.0", "helper.D.s", "1.0", "2.0"),
        ("class C:\n    def __call__(self, x):\n        return x + 1\nF = C()", "helper.F(x)", "x + 1", "x + 2"),
        ("class C:\n    def f(self, x):\n        return x + 1\nO = C()", "helper.O.f(x)", "x + 1", "x + 2"),
        ("class C:\n    def f(self, x):\n        return x + 1\nf = C().f", "helper.f(x)", "x + 1", "x + 2"),
        (f"{SCALED}\n@scaled\ndef f(x):\n    return x", "helper.f(x)", "1.0", "2.0"),
        ("import jax\n@jax.jit\ndef f(x):\n    return x + 1", "helper.f(x)", "x + 1", "x + 2"),
        ("import functools\nf = functools.partial(max, 1.0)", "helper.f(x)", "1.0", "2.0"),
        ("import jax\n@jax.custom_vjp\ndef f(x):\n    return x\nf.defvjp(lambda x: (x, None), lambda r, g: (1.0 * g,))",
         "helper.f(x)", "1.0", "2.0"),
        ("import jax\n@jax.custom_jvp\ndef f(x):\n    return x\nf.defjvp(lambda x, t: (x[0], 1.0 * t[0]))",
         "helper.f(x)", "1.0", "2.0"),
        ("K = {\n    'poly': lambda x: sum([1.0, 0.1, 0.0]) * x,\n}", "helper.K['poly'](x)", "0.1", "0.2"),
        ("import jax\nf = jax.jit(\n    lambda x: x.clip(min=8.0))", "helper.f(x)", "min", "max"),
        ("R = range(2, 6)", "helper.R[0] * x", "6", "9"),
        ("from fractions import Fraction\nF = Fraction(1, 3)", "helper.F * x", "1, 3", "2, 3"),
        ("from collections import deque\nD = deque([1, 2])", "helper.D[0] * x", "1, 2", "1, 9"),
        ("from numpy.polynomial import Polynomial\nP = Polynomial([0, 1])", "helper.P(x)", "0, 1", "0, 7"),
        ("C = {'s': [1.0, 2.0]}\nC['itself'] = C", "helper.C['s']", "1.0", "3.0"),
    ],
)  # fmt: skip
def test_source_digest_changes_with_every_kind_of_value(tmp_path, monkeypatch, helper, used, old, new):
    assert _digest_with(tmp_path / "a", monkeypatch, "helper", helper, used) != _digest_with(
        tmp_path / "b", monkeypatch, "helper", helper.replace(old, new), used
    )


def test_source_digest_of_equal_files_in_two_places_is_equal(tmp_path, monkeypatch):
    """Objects at other addresses and paths of other folders are no other code."""
    helper = (
        "import collections, fractions, logging, pathlib, re, threading\nHERE = pathlib.Path(__file__).parent\n"
        "ALL = [HERE, range(3), fractions.Fraction(1, 3), re.compile('a+'), threading.Lock(), logging.getLogger('x'), "
        "collections.Counter('aab'), {'f': lambda x: (x, 'a' in {'a', 'b', 'c'})}, object()]"
    )
    digests = {_digest_with(tmp_path / name, monkeypatch, "helper", helper, "helper.ALL") for name in "ab"}
    assert len(digests) == 1


def test_source_digest_follows_submodules(tmp_path, monkeypatch):
    before, after = (
        _digest_with(tmp_path / scale, monkeypatch, "kit.deep", f"SCALE = {scale}", "kit.deep.SCALE * x")
        for scale in ("1.0", "2.0")
    )
    assert before != after


def _digest_with(folder, monkeypatch, module, text, used):
    """The digest of a class whose method returns `used`, of a `module` of its own."""
    file = folder / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    if "." in module:
        (file.parent / "__init__.py").write_text("")
    file.write_text(text)
    (folder / "mine.py").write_text(f"import {module}\nclass Mine:\n    def bias(self, x):\n        return {used}\n")
    with monkeypatch.context() as only:
        only.syspath_prepend(folder)
        importlib.invalidate_caches()
        try:
            return source_digest(importlib.import_module("mine").Mine)
        finally:
            for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "helper", "kit")]:
                del sys.modules[name]
