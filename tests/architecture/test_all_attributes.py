"""What is public is said so: every module has a truthful ``__all__``."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest
from sources import is_package, modules


def declared_names(module: str) -> list[str]:
    """The module's ``__all__``, read from the source."""
    for node in modules()[module].body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return list(ast.literal_eval(value))
    pytest.fail(f"{module} has no __all__")


@pytest.mark.parametrize("module", modules())
def test_all_names_exist(module: str) -> None:
    names = declared_names(module)
    assert len(names) == len(set(names))
    loaded = importlib.import_module(module)
    assert [name for name in names if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("module", modules())
def test_public_definitions_are_declared(module: str) -> None:
    defined = {
        node.name
        for node in modules()[module].body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    public = {name for name in defined if not name.startswith("_")}
    assert sorted(public - set(declared_names(module))) == []


@pytest.mark.parametrize("module", modules())
def test_every_module_says_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(modules()[module])


@pytest.mark.parametrize("module", [module for module in modules() if is_package(module)])
def test_packages_only_re_export(module: str) -> None:
    statements = [node for node in modules()[module].body if not isinstance(node, ast.Import | ast.ImportFrom)]
    kinds = {type(node) for node in statements} - {ast.Expr, ast.Assign, ast.AnnAssign}
    assert not kinds, f"{module}: {[kind.__name__ for kind in kinds]} belong in a module of their own"


def test_the_public_api_is_documented() -> None:
    import savestream

    undocumented = []
    for name in savestream.__all__:
        value = getattr(savestream, name)
        if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
            undocumented.append(name)
    assert savestream.__all__
    assert undocumented == []
