"""The rules by which megatron-core's CUDA expressions are re-aimed at the CPU facade (accelerator.py).

megatron-core names its device in the source: `torch.cuda.current_device()`, `device="cuda"`, `x.cuda()`,
`x.type() == 'torch.cuda.FloatTensor'`. The alternatives to rewriting those expressions were weighed: patching `torch`
reaches every other library in the process (a rollout engine, say) and lies to it; a fork or vendored copy has to be
merged with every release. A syntax-tree rewrite touches megatron-core's modules only, and as every new node keeps the
place of the one it replaces, tracebacks still point at the true line of the installed file.

Each rule is local (one expression in, one out), so that it does not depend on a version of megatron-core.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import TypeVar

FACADE = "__dppo_accelerator__"
"""The global name under which a rewritten module finds the facade. It ends in `__`, or class bodies would mangle it."""

_METHODS = {"cuda": "to_device", "pin_memory": "to_device", "type": "type_of"}
_Node = TypeVar("_Node", bound=ast.AST)


def rules_version() -> str:
    """A digest of this file, for the name of what is compiled by it: a version number could be forgotten."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def rewrite(source: bytes | str, path: str) -> ast.Module:
    """The syntax tree of `source`, re-aimed."""
    tree = _Retarget().visit(ast.parse(source, path))
    assert isinstance(tree, ast.Module)
    return ast.fix_missing_locations(tree)


def _facade(place: ast.AST, *attributes: str) -> ast.expr:
    """`FACADE.a.b`, located where `place` is."""
    node: ast.expr = _at(place, ast.Name(FACADE, ast.Load()))
    for attribute in attributes:
        node = _at(place, ast.Attribute(node, attribute, ast.Load()))
    return node


def _at(place: ast.AST, node: _Node) -> _Node:
    return ast.copy_location(node, place)


def _import(place: ast.AST, bound_name: str, module: str, name: str) -> ast.stmt:
    """`bound_name = FACADE.import_from(module, name)`."""
    arguments: list[ast.expr] = [_at(place, ast.Constant(module)), _at(place, ast.Constant(name))]
    call = _at(place, ast.Call(_facade(place, "import_from"), arguments, []))
    return _at(place, ast.Assign([_at(place, ast.Name(bound_name, ast.Store()))], call))


def _is_cuda_name(value: object) -> bool:
    return isinstance(value, str) and (value == "cuda" or (value.startswith("cuda:") and value[5:].isdigit()))


class _Retarget(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`torch.cuda` -> the facade; `x.is_cuda` -> `facade.is_device(x)`."""
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return _facade(node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return _at(node, ast.Call(_facade(node, "is_device"), [node.value], []))
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """`"cuda"`, `"cuda:0"` -> `"cpu"`; also where they are compared with, so that comparisons stay consistent."""
        return _at(node, ast.Constant("cpu")) if _is_cuda_name(node.value) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Only what is in braces: a literal piece such as the "cuda" of `f"cuda{version}"` is text, not a device."""
        node.values = [v if isinstance(v, ast.Constant) else self.visit(v) for v in node.values]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`x.cuda()`, `x.pin_memory()`, `x.type()` and `pin_memory=...`."""
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":  # pinning needs a CUDA driver
                keyword.value = _at(keyword.value, ast.Constant(False))
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _METHODS:
            return node
        if node.func.attr == "type" and (node.args or node.keywords):  # a cast, not a question
            return node
        method = _facade(node, _METHODS[node.func.attr])
        return _at(node, ast.Call(method, [node.func.value, *node.args], node.keywords))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        """`from torch.cuda.x import a` -> `a = facade.import_from("torch.cuda.x", "a")`."""
        module = node.module or ""
        if node.level or not (module == "torch.cuda" or module.startswith("torch.cuda.")):
            return node
        return [_import(node, alias.asname or alias.name, module, alias.name) for alias in node.names]
