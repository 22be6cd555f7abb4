"""Which lines of the package read a setting, found by reading the source.

A list by hand would be wrong within a week. Settings are handed on as sections (`config: ObjectiveConfig`), so a small
inference over annotations is enough: parameters, fields and return types name classes, and `config.rollout.sampling`
is followed through them. What it cannot follow (a loop over entries, `getattr`) counts by name where only one class of
settings has a field of that name. tests/test_config.py asks for a reader of every setting: nothing reads one without.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache

from dppo_megatron.config.reference import all_settings
from dppo_megatron.config.schema import Config
from support.job import REPOSITORY

_PACKAGE = REPOSITORY / "dppo_megatron"
_ITSELF = ("config/reference.py", "commands/config.py")

Classes = frozenset[str]
"""Names of the classes that something may be an instance of; `[]A` is a list of A, or a mapping of names to A."""

_STANDS_FOR = {
    "ResolvedSet": ("SetConfig", "DataConfig"),
    "ResolvedTrainSet": ("TrainSetConfig", "SetConfig", "DataConfig"),
    "ResolvedEvalSet": ("EvalSetConfig", "EvalConfig", "SetConfig", "DataConfig"),
    "Template": ("SetConfig", "DataConfig"),
    "RewardConfig": ("SetRewardConfig",),
}
"""Settings after inheritance -> the classes that they come from, with fields of the same names."""


@dataclass(frozen=True, slots=True, order=True)
class Reading:
    """One line that reads a setting."""

    file: str
    """From the root of the repository: dppo_megatron/steps/build.py."""
    line: int
    inside: str
    """The function or class around it."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" ({self.inside})" if self.inside else "")


def readings(owner: type, name: str) -> list[Reading]:
    """The lines that read the field `name` of the settings class `owner`; those outside of config/ first."""
    found = {one for base in owner.__mro__ for one in _index().get((base.__name__, name), ())}
    return sorted(found, key=lambda one: (one.file.startswith("dppo_megatron/config/"), one))


@cache
def _index() -> dict[tuple[str, str], set[Reading]]:
    """(class, field) -> where it is read."""
    trees = {
        path.relative_to(_PACKAGE.parent).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(_PACKAGE.rglob("*.py"))
        if path.relative_to(_PACKAGE).as_posix() not in _ITSELF
    }
    known = _Known(trees.values())
    found: dict[tuple[str, str], set[Reading]] = {}
    for file, tree in trees.items():
        for owner, name, line, inside in _Reader(known).read(tree):
            found.setdefault((owner, name), set()).add(Reading(file, line, inside))
    return found


class _Known:
    """What the annotations of the package say: attributes of classes, and results of functions."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        owners = {one.owner for one in all_settings()} | {Config}
        self.settings = {base.__name__ for owner in owners for base in owner.__mro__[:-1]} | _STANDS_FOR.keys()
        names = [(owner.__name__, item.name) for owner in owners for item in fields(owner)]
        self.only_owner = {
            name: frozenset(owner for owner, other in names if other == name) for name in {name for _, name in names}
        }
        """Field -> the classes of settings that have it."""
        self._bases: dict[str, list[str]] = {}
        self._attributes: dict[str, dict[str, Classes]] = {}
        self.results: dict[str, Classes] = {}
        self.other_attributes: set[str] = set()
        """Names of attributes of everything that is no setting."""
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._learn(node)
                elif isinstance(node, ast.FunctionDef) and node.returns is not None:
                    self.results[node.name] = self.results.get(node.name, frozenset()) | classes_in(node.returns)

    def attribute(self, owner: str, name: str) -> Classes:
        """What the attribute `name` of an instance of `owner` may be."""
        own = self._attributes.get(owner, {}).get(name)
        inherited = (self.attribute(base, name) for base in self._bases.get(owner, ()))
        return own if own is not None else frozenset[str]().union(*inherited)

    def note(self, owner: str, name: str, classes: Classes) -> None:
        """`owner` has an attribute `name`."""
        self._attributes.setdefault(owner, {})[name] = classes

    def is_class(self, name: str) -> bool:
        """Whether the package has a class of that name."""
        return name in self._bases

    def _learn(self, node: ast.ClassDef) -> None:
        self._bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id != node.name]
        for item in ast.walk(node):
            names: set[str] = set()
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name | ast.Attribute):
                name = item.target.id if isinstance(item.target, ast.Name) else item.target.attr
                self.note(node.name, name, classes_in(item.annotation))
                names = {name}
            elif isinstance(item, ast.FunctionDef):
                given, names = parameters(item), {item.name}
                if (
                    any(getattr(one, "id", "") == "property" for one in item.decorator_list)
                    and item.returns is not None
                ):
                    self.note(node.name, item.name, classes_in(item.returns))
                for one in ast.walk(item):
                    if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name) and one.value.id in given:
                        for target in one.targets:
                            if isinstance(target, ast.Attribute):
                                self.note(node.name, target.attr, given[one.value.id])
            if node.name not in self.settings:
                self.other_attributes |= names


class _Reader(ast.NodeVisitor):
    """Finds the fields of settings that one module reads."""

    def __init__(self, known: _Known) -> None:
        self._known = known
        self._names: list[dict[str, Classes]] = [{}]
        self._classes: list[str] = []
        self._inside: list[str] = []
        self._found: list[tuple[str, str, int, str]] = []

    def read(self, tree: ast.Module) -> Iterator[tuple[str, str, int, str]]:
        """Class, field, line and what is around it, of every reading."""
        self.visit(tree)
        yield from self._found

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Note the class that the code inside belongs to."""
        self._classes.append(node.name)
        self._inside.append(node.name)
        self.generic_visit(node)
        self._classes.pop()
        self._inside.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Note what the parameters are, by their annotations."""
        given = parameters(node)
        if self._classes and node.args.args and node.args.args[0].arg == "self":
            given["self"] = frozenset({self._classes[-1]})
        self._names.append({**self._names[-1], **given})
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()
        self._names.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        """Note what the assigned names are."""
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for to, value in pairs:
                classes = self._classes_of(value)
                if isinstance(to, ast.Name) and classes:
                    self._names[-1][to.id] = classes
                elif isinstance(to, ast.Attribute) and self._classes and classes:
                    self._known.note(self._classes[-1], to.attr, classes)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Note what the name is said to be."""
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self._names[-1][node.target.id] = classes_in(node.annotation)

    def visit_For(self, node: ast.For) -> None:
        self._each(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._each(node.target, node.iter)
        self.generic_visit(node)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for part in node.generators:  # before what is made of them
            self._each(part.target, part.iter)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def _each(self, target: ast.expr, source: ast.expr) -> None:
        """The names of a loop over a container of settings; of pairs, the second."""
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute):
            source = source.func.value if source.func.attr in ("items", "values") else source
        to = target.elts[-1] if isinstance(target, ast.Tuple) else target
        inside = frozenset(one[2:] for one in self._classes_of(source) if one.startswith("[]"))
        if isinstance(to, ast.Name) and inside:
            self._names[-1][to.id] = inside

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Note a setting that is read."""
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return
        owners = self._classes_of(node.value) & self._known.settings
        if not owners and not self._classes_of(node.value) and node.attr not in self._known.other_attributes:
            owners = self._known.only_owner.get(node.attr, frozenset())
            owners = owners if len(owners) == 1 else frozenset()
        self._note(owners, node.attr, node.lineno)

    def _note(self, owners: Iterable[str], name: str, line: int) -> None:
        for owner in owners:
            for one in (owner, *_STANDS_FOR.get(owner, ())):
                self._found.append((one, name, line, ".".join(self._inside)))

    def _classes_of(self, node: ast.AST) -> Classes:
        if isinstance(node, ast.Name):
            return self._names[-1].get(node.id, frozenset())
        if isinstance(node, ast.Attribute):
            found = [self._known.attribute(owner, node.attr) for owner in self._classes_of(node.value)]
            return frozenset[str]().union(*found)
        if isinstance(node, ast.Subscript):
            return frozenset(one[2:] for one in self._classes_of(node.value) if one.startswith("[]"))
        if isinstance(node, ast.Call):
            called = node.func
            name = (
                called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
            )
            return frozenset({name}) if self._known.is_class(name) else self._known.results.get(name, frozenset())
        if isinstance(node, ast.IfExp):
            return self._classes_of(node.body) | self._classes_of(node.orelse)
        return frozenset()


def parameters(node: ast.FunctionDef) -> dict[str, Classes]:
    """The classes that a function's annotated parameters may have."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return {one.arg: classes_in(one.annotation) for one in every if one.annotation is not None}


def classes_in(annotation: ast.expr) -> Classes:
    """Of `A`, `A | B`, `A | None`, `list[A]` and `dict[str, A]`."""
    if isinstance(annotation, ast.Name):
        return frozenset({annotation.id})
    if isinstance(annotation, ast.BinOp):
        return classes_in(annotation.left) | classes_in(annotation.right)
    if isinstance(annotation, ast.Subscript):
        inside = annotation.slice.elts[-1] if isinstance(annotation.slice, ast.Tuple) else annotation.slice
        return frozenset(f"[]{one}" for one in classes_in(inside))
    return frozenset()
