"""The code of a file without its words, which change nothing that runs."""

from __future__ import annotations

import ast
from functools import cache

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def code_of(text: bytes, suffix: str) -> bytes:
    """The text of a file; of Python its code, without comments and docstrings."""
    if suffix != ".py":
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).encode()
