"""What the images install: every file that pip downloads is one whose hash is in the repository."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "deploy" / "images"
NO_DOWNLOAD = {"--no-index", "--no-deps"}
EXTRAS = {"controller": ("docker", "kubernetes", "postgresql"), "spark-worker": ("postgresql", "spark")}


def pinned(file: Path) -> dict[str, tuple[str, int]]:
    """Of each package: its version, and how many hashes it has."""
    entries = re.findall(r"^([\w.-]+)==(\S+)((?: *\\\n +--hash=sha256:[0-9a-f]{64})*)", file.read_text(), re.MULTILINE)
    return {normal(name): (version, hashes.count("--hash")) for name, version, hashes in entries}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("dockerfile", sorted(IMAGES.glob("*.Dockerfile")), ids=lambda path: path.stem)
def test_every_download_of_pip_has_a_hash(dockerfile):
    text = dockerfile.read_text().replace("\\\n", " ")
    commands = [
        command for command in re.split(r"&&|\n", text) if re.search(r"pip (install|wheel|download)\b", command)
    ]
    commands = [command for command in commands if not command.lstrip().startswith("#")]
    assert commands
    listed = [name for command in commands for name in re.findall(r"-r /?(\S+)", command)]
    for command in commands:
        options = set(command.split())
        # With neither an isolated environment nor dependencies, a local directory downloads nothing.
        local = options >= {"--no-deps", "--no-build-isolation"} and options & {"."}
        assert "--require-hashes" in options or options >= NO_DOWNLOAD or local, command
        # What has no wheel is built: with the tools that are installed, or not at all.
        if "--require-hashes" in options:
            assert options & {"--only-binary", "--no-build-isolation"}, command
    for name in listed:
        requirements = pinned(IMAGES / name)
        assert requirements
        assert [package for package, (_, hashes) in requirements.items() if not hashes] == []
        versions = pinned(IMAGES / "constraints.txt")
        assert {package: version for package, (version, _) in requirements.items()}.items() <= {
            package: version for package, (version, _) in versions.items()
        }.items()


@pytest.mark.parametrize("image", EXTRAS)
def test_requirements_of_an_image_hold_what_the_project_asks_for(image):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(line for extra in EXTRAS[image] for line in extras[extra])]
    names = {normal(re.split(r"[\s<>=!~;\[]", line)[0]) for line in asked}
    assert names <= pinned(IMAGES / f"requirements-{image}.txt").keys(), "run `make requirements`"
