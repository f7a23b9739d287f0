"""Mutants of a module: the same source with one small fault in one function.

What is changed is arithmetic, comparisons, logic, numbers, reductions (mean for sum, min for max),
gradients (`detach` left out), clamps and roots, and statements that are left out. Text, errors,
assertions and annotations stay as they are: a fault there is no wrong number.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SWAPPED = {
    "mean": "sum",
    "sum": "mean",
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "argmin": "argmax",
    "argmax": "argmin",
    "minimum": "maximum",
    "maximum": "minimum",
    "any": "all",
    "all": "any",
    "log1p": "log",
    "ceil": "floor",
    "floor": "ceil",
    "fmean": "fsum",
}
"""A function or method -> what a mutant calls in its place."""

LEFT_OUT = {
    "detach",
    "abs",
    "clamp",
    "sqrt",
    "square",
    "relu",
    "normalize",
    "sorted",
    "log",
    "exp",
    "rsqrt",
    "round",
    "copy",
    "clip",
}
"""Functions and methods whose mutant gives back their (first) argument."""

SILENT = {"__init__", "note", "say", "warn", "print"}
"""Calls that are not left out: what they do is no number, or nothing goes without them."""

SIDES = {"left": "right", "right": "left"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault.

    Attributes:
        function: qualified name of the innermost function that holds it. line: where that function
            begins, and `at` where the fault is.
        change: the expression before and after; with `function` its name, which a moved line does
            not change.
        index: its number in the module.
    """

    function: str
    line: int
    at: int
    change: str
    index: int

    @property
    def name(self) -> str:
        """What lists of equivalent mutants call it."""
        return f"{self.function}: {self.change}"


def _code(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _call_name(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _number(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 2 if value else 1.0
    return None


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that a mutant has in place of this one."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield _with(node, op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield _with(node, ops=[COMPARISONS[type(node.ops[0])]()])
    elif isinstance(node, ast.BoolOp):
        yield _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.If | ast.IfExp) and not isinstance(
        node.test, ast.Compare | ast.UnaryOp
    ):
        yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and (changed := _number(node.value)) is not None:
        yield ast.Constant(changed)
    elif (
        isinstance(node, ast.keyword)
        and isinstance(node.value, ast.Constant)
        and node.value.value in SIDES
    ):
        yield _with(node, value=ast.Constant(SIDES[node.value.value]))
    elif isinstance(node, ast.Call):
        name = _call_name(node)
        if name in SWAPPED and isinstance(node.func, ast.Attribute):
            yield _with(node, func=_with(node.func, attr=SWAPPED[name]))
        elif name in SWAPPED and isinstance(node.func, ast.Name):
            if name in ("min", "max", "any", "all"):
                yield _with(node, func=_with(node.func, id=SWAPPED[name]))
        elif name in LEFT_OUT:
            library = isinstance(node.func, ast.Name) or getattr(
                getattr(node.func, "value", None), "id", ""
            ) in (
                "F",
                "np",
                "torch",
                "math",
            )
            if library and node.args:
                yield node.args[0]
            elif not library and isinstance(node.func, ast.Attribute):
                yield node.func.value
    effect = (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and _call_name(node.value) not in SILENT
    )
    if isinstance(node, ast.AugAssign) or effect:
        yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


class _Walk(ast.NodeTransformer):
    """Visits all places of all functions in order; puts one replacement in where `wanted` says
    so.
    """

    def __init__(self, wanted: int | None) -> None:
        self.wanted, self.names, self.found = wanted, [], []
        self.functions: list[tuple[str, int]] = []

    def _scope(self, node: ast.FunctionDef | ast.ClassDef, visit: Callable[[], None]) -> ast.AST:
        self.names.append(node.name)
        visit()
        self.names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        def body() -> None:
            # as Python counts
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            self.functions.append((".".join(self.names), first))
            self.names.append("<locals>")
            node.body = [self.visit(statement) for statement in node.body]
            self.names.pop()
            self.functions.pop()

        return self._scope(node, body)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._scope(
            node, lambda: setattr(node, "body", [self.visit(statement) for statement in node.body])
        )

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        # zip's guard, not a value
        return node if node.arg == "strict" else self.generic_visit(node)

    visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = visit_Raise

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if self.functions:
            for changed in replacements(node):
                name, line = self.functions[-1]
                index = len(self.found)
                before, after = _short(node, changed)
                self.found.append(
                    Mutant(name, line, getattr(node, "lineno", line), f"{before} -> {after}", index)
                )
                if index == self.wanted:
                    return ast.copy_location(changed, node)
        return super().generic_visit(node)


def _short(node: ast.AST, changed: ast.AST) -> tuple[str, str]:
    if isinstance(node, ast.If):
        return f"if {_code(node.test)}", f"if {_code(changed.test)}"
    return _code(node), _code(changed)


def mutants(source: str) -> list[Mutant]:
    """All mutants of a module's source; equal changes in one function are told apart by a
    number.
    """
    walk = _Walk(None)
    walk.visit(ast.parse(source))
    seen: Counter[str] = Counter()
    told = []
    for mutant in walk.found:
        seen[mutant.name] += 1
        again = f" ({seen[mutant.name]})" if seen[mutant.name] > 1 else ""
        told.append(
            Mutant(mutant.function, mutant.line, mutant.at, mutant.change + again, mutant.index)
        )
    return told


def mutated(source: str, index: int) -> ast.Module:
    """The module with the fault of that number."""
    tree = _Walk(index).visit(ast.parse(source))
    return ast.fix_missing_locations(tree)
