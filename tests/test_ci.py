"""The scripts of CI and releases: stages, locked versions, and what a release is refused for."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
CI = (ROOT / ".ci/run").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: The extras that stages of .ci/run install.
EXTRAS = ("dev", "docs", "report", "peers", "ray", "slurm", "browser")
#: The files of a release that name its version.
NAMING = ("pyproject.toml", "posx/__init__.py", "CITATION.cff", "CHANGELOG.md")


def test_jobs_of_the_public_ci_run_each_stage_once():
    described = re.findall(r"^#   (\w+) ", CI, re.MULTILINE)
    jobs = re.findall(r"stages: ([\w ]+), minutes: (\d+)", (ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    assert sorted(stage for stages, _ in jobs for stage in stages.split()) == sorted(described)
    assert all(int(minutes) <= 40 for _, minutes in jobs)
    done = subprocess.run([ROOT / ".ci/run", "nothing"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.split("Stages: ")[1].split() == described


def test_locked_versions_are_exact_and_fit_the_requirements():
    lines = (ROOT / "scripts/constraints-3.11.txt").read_text(encoding="utf-8").splitlines()
    versions = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[\w.]+", version) for version in versions.values())
    by_name = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in versions.items()}
    asked = PROJECT["dependencies"] + [line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra]]
    for line in asked:
        requirement = Requirement(line)
        if requirement.name != "posx" and (
            not requirement.marker or requirement.marker.evaluate({"python_version": "3.11"})
        ):
            assert requirement.specifier.contains(by_name[requirement.name.lower()]), line


@pytest.mark.parametrize("script", [".ci/run", *(path.relative_to(ROOT) for path in ROOT.glob("*/*.sh"))], ids=str)
def test_scripts_parse(script):
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0


def released(folder, **changes):
    """Return what the release script says of a small repository with `changes`, {end of a path: (old, new)}."""
    for path in (*NAMING, "scripts/release.sh"):
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    version = PROJECT["version"]
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## Unreleased\n\n## {version} - 2026-01-31\n\n- A line.\n")
    # The first step after the checks is a virtual environment.
    (folder / "python").write_text("#!/bin/sh\necho built >&2\nexit 9\n")
    (folder / "python").chmod(0o755)
    for path, (old, new) in changes.items():
        (named,) = (folder / name for name in NAMING if name.endswith(path))
        named.write_text(named.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", folder]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    subprocess.run([*git, "tag", f"v{version}"], check=True)
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(folder / "python")}
    return subprocess.run([folder / "scripts/release.sh"], capture_output=True, text=True, env=env)


def test_release_is_built_if_version_changelog_and_tag_agree(tmp_path):
    done = released(tmp_path)
    assert (done.returncode, done.stderr) == (9, "built\n")


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        ("__init__.py", "__version__ = ", "__version__ = '9' or ", "posx/__init__.py: __version__ differs"),
        ("CITATION.cff", "version: ", "version: 9", "CITATION.cff: version differs"),
        ("CHANGELOG.md", "2026-01-31", "soon", "CHANGELOG.md: its newest release is"),
        ("CHANGELOG.md", "Unreleased\n", "Unreleased\n\n- Forgotten.\n", "CHANGELOG.md: entries are under Unreleased"),
        ("pyproject.toml", 'version = "', 'version = "9.', "git: tag v9."),
    ],
)
def test_release_is_refused_by_the_name_of_what_differs(tmp_path, path, old, new, said):
    done = released(tmp_path, **{path: (old, new)})
    assert done.returncode == 1 and said in done.stderr and "built" not in done.stderr
