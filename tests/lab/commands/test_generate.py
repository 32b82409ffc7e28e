"""`posx generate`: the continuation of a prompt."""

from posx.errors import ConfigError
from tests import tiny
from tests.lab.commands import one_line


def test_generate_continues_the_prompt(capsys, whole):
    words = ["generate", f"--workdir={whole}", "--prompt=kara", "--num_tokens=12"]
    code, out, err = tiny.call(capsys, *words)
    assert code == 0 and out.startswith("kara") and len(out) > 5, err
    assert tiny.call(capsys, *words)[1] == out
    assert tiny.call(capsys, *words, "--seed=1")[1] != out
    code, greedy, _ = tiny.call(capsys, *words, "--temperature=0")
    assert code == 0 and tiny.call(capsys, *words, "--temperature=0", "--seed=5")[1] == greedy


def test_generate_prints_nothing_before_an_error(capsys, whole, monkeypatch):
    def beyond(*args, **options):
        raise ConfigError("at most 3 new tokens.")
        yield

    monkeypatch.setattr("posx.lab.commands.results.generate", beyond)
    code, out, err = tiny.call(capsys, "generate", f"--workdir={whole}", "--prompt=kara")
    assert code == 2 and out == ""
    assert "at most 3 new tokens. The token before the prompt counts" in one_line(err)
