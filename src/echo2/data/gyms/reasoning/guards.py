"""Expressions that scorers of reasoning-gym evaluate, kept to data: no reply is ever run.

Invariant: of a text that passes ``check``, evaluation calls nothing but the functions named below and reads no
attribute. Several scorers hand the reply to ``eval`` or to sympy's parser, which is ``eval`` behind a tokenizer; both
are replaced by these before the library is imported.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Collection
from typing import Any

MOST_CHARS = 20_000
FUNCTIONS = frozenset(
    {
        "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh",
        "atanh", "exp", "log", "ln", "sqrt", "cbrt", "root", "Abs", "sign", "erf", "erfi", "gamma", "Si", "Ci", "Ei",
        "li", "fresnels", "fresnelc", "Integral", "factorial", "Rational", "Integer", "Float", "Add", "Mul", "Pow",
    }
)  # fmt: skip
"""What an answer of mathematics may call."""

_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.List, ast.Tuple, ast.Dict,
    ast.Set, ast.Load,
)  # fmt: skip


def check(text: str, functions: Collection[str] | None) -> ast.Expression:
    """The tree of a text of literals and operators; names, and calls of ``functions``, where those are given.

    Raises ValueError or SyntaxError for anything else.
    """
    if len(text) > MOST_CHARS:
        raise ValueError(f"an expression must have at most {MOST_CHARS} characters, got {len(text)}")
    tree = ast.parse(text.strip(), mode="eval")
    called: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and functions is not None:
            if not isinstance(node.func, ast.Name) or node.func.id not in functions or node.keywords:
                raise ValueError("an expression must call only functions of mathematics")
            called.add(id(node.func))
        elif isinstance(node, ast.Name) and functions is not None:
            if node.id.startswith("_"):
                raise ValueError(f"an expression must not name {node.id!r}")
        elif not isinstance(node, _NODES):
            raise ValueError(f"an expression must be of numbers and operators, got {type(node).__name__}")
        elif functions is not None and isinstance(node, ast.Constant) and not isinstance(node.value, int | float):
            raise ValueError("an expression must hold no texts")
    return tree


def literal(text: str, *_: Any) -> Any:
    """``eval`` of literals and operators on them."""
    return builtins.eval(compile(check(text, None), "<expression>", "eval"), {"__builtins__": {}})


def guarded(parse: Callable[..., Any]) -> Callable[..., Any]:
    """sympy's ``parse_expr``, for expressions that pass ``check``."""

    def parse_expr(text: str, *args: Any, **kwargs: Any) -> Any:
        check(text, FUNCTIONS)
        return parse(text, *args, **kwargs)

    return parse_expr
