"""The plan of Spark's parser as a tree, read from the complete description that `PlanWalker.java` writes.

Pure; `limits` estimates the tree. Nothing of the description is lost: a node that the plan holds in several places is
one object in all of them, so that a tree may have more nodes than there are objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PlanNode:
    """A plan or an expression. `kind` is its class without package."""

    kind: str
    is_plan: bool
    values: dict[str, Any]
    """Its texts and numbers, and the sizes of its collections, by their path. Those of an object that is neither plan
    nor expression follow the path of the object: `identifier.name`."""
    below: list[tuple[str, PlanNode]] = field(default_factory=list)
    """The plans and expressions in its parameters, each with its path, in the order of Spark."""
    hidden: list[PlanNode] = field(default_factory=list)
    """Those that are in no parameter of a node."""

    def expressions(self) -> list[PlanNode]:
        return [node for _, node in self.below if not node.is_plan]

    def plans(self) -> list[PlanNode]:
        return [node for _, node in self.below if node.is_plan]

    def texts(self, name: str) -> list[str]:
        """The list of texts with this name, in lower case, for the names of Spark do not depend on it."""
        found = self.values.get(name)
        return [text.lower() for text in found] if isinstance(found, list) else []


def read_plan(description: str) -> PlanNode:
    """The root of the parsed plan that the description is of."""
    items: list[dict[str, Any]] = json.loads(description)
    nodes: list[PlanNode] = []
    places: list[tuple[str, bool]] = []
    for item in items:
        parent = item["parent"]
        path, hidden = item["field"], item.get("hidden", False)
        if parent >= 0 and items[parent]["kind"] not in ("tree", "again"):  # belongs to the node above
            path = f"{places[parent][0]}.{path}"
            hidden = hidden or places[parent][1]
        places.append((path, hidden))
        if item["kind"] == "again":
            nodes.append(nodes[item["values"]["of"]])
        elif item["kind"] == "tree":
            kind = str(item["class"]).rpartition(".")[2].rstrip("$")
            nodes.append(PlanNode(kind, item.get("plan", False), item["values"]))
        else:
            owner = nodes[parent]
            owner.values.update({f"{path}.{name}": value for name, value in item["values"].items()})
            nodes.append(owner)
            continue
        if parent < 0:
            continue
        if not hidden:
            nodes[parent].below.append((path, nodes[-1]))
        elif item["kind"] == "tree":
            nodes[0].hidden.append(nodes[-1])
    return nodes[0]


def number_of_nodes(root: PlanNode) -> float:
    """The nodes of a tree; one that is in several places counts in each."""
    counts: dict[int, float] = {}
    pending = [root]
    while pending:
        node = pending[-1]
        unknown = [part for _, part in node.below if id(part) not in counts]
        if unknown:
            pending.extend(unknown)
            continue
        counts[id(node)] = 1.0 + sum(counts[id(part)] for _, part in node.below)
        pending.pop()
    return counts[id(root)]


def fold(root: PlanNode, parts: Callable[[PlanNode], list[PlanNode]], visit: Callable[[PlanNode, list[T]], T]) -> T:
    """The result of `visit` for `root`; it gets a node and the results of its parts. Without recursion: a plan is as
    deep as its text is long."""
    done: list[T] = []
    pending: list[tuple[PlanNode, int]] = [(root, -1)]
    while pending:
        node, count = pending.pop()
        if count < 0:
            below = parts(node)
            pending.append((node, len(below)))
            pending.extend((part, -1) for part in reversed(below))
        else:
            cut = len(done) - count
            results = done[cut:]
            del done[cut:]
            done.append(visit(node, results))
    return done.pop()
