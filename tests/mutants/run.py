"""Plant each fault of `mutants.py` in a copy of the tree, and check that the named tests find it.

make mutants                      all of them
make mutants ARGS="token settle"  those whose names have one of the words
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


def copy_to(directory: Path) -> None:
    """The files that Git tracks or would track, as they are now."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, directory / name)


def run(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """The exit code of pytest, and what it printed."""
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'workers'}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", "-p", "no:cacheprovider", *tests]
    result = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def finder(output: str) -> str:
    """The test that failed first."""
    found = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return found[0] if found else output.strip().splitlines()[-1]


def survives(tree: Path, mutant: Mutant) -> bool:
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        print(f"WRONG     {mutant.name}: its text occurs {text.count(mutant.old)} times in {mutant.file}", flush=True)
        return True
    began = time.monotonic()
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        code, output = run(tree, mutant.tests)
    finally:
        file.write_text(text, encoding="utf-8")
    seconds = time.monotonic() - began
    # 1: tests failed. Any other code says that none ran.
    if code == 1:
        print(f"found     {mutant.name} ({seconds:.0f} s): {finder(output)}", flush=True)
    else:
        print(f"SURVIVED  {mutant.name} ({seconds:.0f} s, exit code {code})", flush=True)
    return code != 1


def main(words: list[str]) -> int:
    chosen = [one for one in MUTANTS if not words or any(word in one.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="osrdyne-mutants-") as directory:
        tree = Path(directory)
        copy_to(tree)
        left = [one for one in chosen if survives(tree, one)]
    print(f"{len(chosen)} faults, {len(chosen) - len(left)} found, {len(left)} not found")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
