"""Figures of the code as JSON: `.venv/bin/python tools/figures.py`; `--collect` adds the cases that pytest collects.

Product code is `osrdyne/` and `workers/`. Empty lines count; lengths are in lines; percentiles are of the nearest rank.
A constructor is an `__init__`, a builder is a function called `build…`, `make…`, `create…` or `wire…`; parameters are
counted without `self` and `cls`. Classes with ten or more fields, such as settings, are counted on their own.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("osrdyne", "workers")
MANY = 10
"""Parameters or fields."""
SHORT = 60
"""Lines of a short file."""
BUILDER = re.compile(r"_*(build|make|create|wire)(_|$)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> list[Path]:
    """The Python files in git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *folders], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name.endswith(".py") and (ROOT / name).exists()]


def percentile(values: Iterable[int], share: float) -> int:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(node: Function) -> int:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or node.lineno) - first + 1


def import_lines(tree: ast.AST) -> int:
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return len({line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)})


def comment_lines(text: str) -> int:
    """Lines with a comment, beside code or alone; directives for tools are not comments."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    directive = re.compile(r"#\s*(noqa|type:|fmt:|pragma|nosec)")
    return len({one.start[0] for one in tokens if one.type == tokenize.COMMENT and not directive.match(one.string)})


def parameters(node: Function) -> int:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(one.arg not in {"self", "cls"} for one in named)


def fields(node: ast.ClassDef) -> int:
    return sum(isinstance(statement, ast.AnnAssign) for statement in node.body)


def is_test(node: Function) -> bool:
    return node.name.startswith("test_")


def code_figures(paths: list[Path]) -> dict[str, object]:
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    total = sum(lines.values())
    found = [(path, node) for path, tree in trees.items() for node in functions(tree)]
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    lengths = [length(node) for _, node in found]
    return {
        "modules": len(paths),
        "lines": total,
        "module length": {name: percentile(lines.values(), share) for name, share in (("p50", 0.5), ("p90", 0.9))},
        "function length": {name: percentile(lengths, share) for name, share in (("p50", 0.5), ("p90", 0.9))},
        "import lines, %": round(100 * sum(map(import_lines, trees.values())) / total, 1),
        "comment lines, %": round(100 * sum(map(comment_lines, texts.values())) / total, 1),
        f"constructors and builders with {MANY} or more parameters": sorted(
            f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {parameters(node)}"
            for path, node in found
            if parameters(node) >= MANY and (node.name == "__init__" or BUILDER.match(node.name))
        ),
        f"classes with {MANY} or more fields": sum(fields(node) >= MANY for node in classes),
        f"files of at most {SHORT} lines, without __init__": sum(
            count <= SHORT for path, count in lines.items() if path.name != "__init__.py"
        ),
    }


def test_figures(*, collect: bool) -> dict[str, object]:
    paths = sources("tests")
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    figures: dict[str, object] = {
        "modules": len(paths),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths),
        "test functions": sum(is_test(node) for tree in trees for node in functions(tree)),
    }
    if collect:
        figures["collected cases"] = collected_cases()
    return figures


def collected_cases() -> int:
    """Cases that pytest collects, those of Docker and Kubernetes included."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:randomly", "tests"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return sum("::" in line for line in done.stdout.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the code; prints JSON.")
    parser.add_argument(
        "--collect", action="store_true", help="count collected test cases as well; takes half a minute"
    )
    collect = parser.parse_args().collect
    figures = {"product": code_figures(sources(*PRODUCT)), "tests": test_figures(collect=collect)}
    sys.stdout.write(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
