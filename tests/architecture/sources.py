"""The project's modules as syntax trees, for the tests of this directory."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PACKAGE = PROJECT / "savestream"


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name."""
    trees = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PROJECT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return trees


def is_package(module: str) -> bool:
    return (PROJECT / Path(*module.split(".")) / "__init__.py").is_file()


def imports(module: str, nodes: Iterator[ast.AST]) -> Iterator[tuple[str, int]]:
    """The dotted names that ``nodes`` import, absolute, with their lines.

    ``from savestream import errors`` counts as ``savestream.errors``, ``from savestream import load`` as
    ``savestream``: what is imported is the longest prefix that is a module.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in modules() else base), node.lineno


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if is_package(module) else module.split(".")[:-1]
    parents = package[: len(package) - (node.level - 1)]
    return ".".join([*parents, *([node.module] if node.module else [])])


def executed_on_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: neither function bodies nor ``if TYPE_CHECKING:`` blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node):
            continue
        yield node
        yield from executed_on_import(node)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
