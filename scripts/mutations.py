"""Which small changes of the source `make mutants` tries: made at every executable place, drawn by
a fixed seed."""

import difflib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_if_exp

Operator = tuple[type, Callable[[Any], Iterable[cst.CSTNode]]]


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    line: int
    """First line of the change, 1 for the first of the file."""
    statement: range
    """Lines of the statement around it; of a compound statement those of its header."""
    function: range
    """Lines of the function around it, or of the whole file."""
    operator: str
    before: tuple[str, ...]
    """The lines that it removes, without indentation."""
    after: tuple[str, ...]
    """The lines that it adds."""
    original: str
    """The file."""
    source: str
    """The changed file."""

    area: str = ""
    """Of scripts/mutants.toml, in which the file is."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What names it in the file of reasons, which other changes of the source leave as it
        is."""
        return self.file, "\n".join(self.before), "\n".join(self.after)


Named = tuple[str, Callable[[], Mutant]]
"""The name of a mutant, and what makes it."""


def operator_swap_arguments(node: cst.Call) -> Iterator[cst.Call]:
    """f(a, b) -> f(b, a) and f(x=a, y=b) -> f(x=b, y=a), for neighbours."""
    for i, (first, second) in enumerate(zip(node.args, node.args[1:], strict=False)):
        if not (first.star or second.star or first.value.deep_equals(second.value)):
            swapped = first.with_changes(value=second.value), second.with_changes(value=first.value)
            yield node.with_changes(args=[*node.args[:i], *swapped, *node.args[i + 2 :]])


def operator_remove_call(node: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
    """A call whose result nobody takes is left out."""
    if m.matches(node, m.SimpleStatementLine(body=[m.Expr(value=m.Call() | m.Await())])):
        yield node.with_changes(body=[cst.Pass()])


OPERATORS: list[Operator] = [
    *mutation_operators,
    (cst.If, operator_if_exp),  # the condition forced, as mutmut does in `a if b else c`
    (cst.CompIf, operator_if_exp),
    (cst.Call, operator_swap_arguments),
    (cst.SimpleStatementLine, operator_remove_call),
]


class _Finder(cst.CSTVisitor):
    """Collects (node, its replacement, operator, statement, function) over a module."""

    def __init__(self, positions: dict, num_lines: int) -> None:
        super().__init__()
        self.positions = positions
        self.statements: list[tuple[cst.CSTNode, range]] = []
        self.functions: list[tuple[cst.CSTNode, range]] = [(cst.Pass(), range(1, num_lines + 1))]
        self.num_raises = 0
        self.found: list[tuple[cst.CSTNode, cst.CSTNode, str, range, range]] = []

    def _lines(self, node: cst.CSTNode) -> range:
        return range(self.positions[node].start.line, self.positions[node].end.line + 1)

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _does_not_execute(node):
            return False
        if isinstance(node, cst.FunctionDef):
            self.functions.append((node, self._lines(node)))
        if isinstance(node, cst.BaseCompoundStatement):
            self.statements.append(
                (node, range(self._lines(node).start, self._lines(node.body).start + 1))
            )
        if isinstance(node, cst.SimpleStatementLine):
            self.statements.append((node, self._lines(node)))
        self.num_raises += isinstance(node, cst.Raise)
        if not (self.num_raises and isinstance(node, cst.BaseString)):
            for kind, operator in OPERATORS:
                if isinstance(node, kind) and node in self.positions and self.statements:
                    around = self.statements[-1][1], self.functions[-1][1]
                    self.found += [
                        (node, changed, operator.__name__, *around) for changed in operator(node)
                    ]
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        for stack in (self.statements, self.functions):
            if stack and stack[-1][0] is original_node:
                stack.pop()
        self.num_raises -= isinstance(original_node, cst.Raise)


def _does_not_execute(node: cst.CSTNode) -> bool:
    """Annotations, names of types in CamelCase, imports, and documentation."""
    if isinstance(node, cst.Annotation | cst.Import | cst.ImportFrom | cst.Comment):
        return True
    if m.matches(node, m.Expr(value=m.SimpleString() | m.ConcatenatedString() | m.Ellipsis())):
        return True
    if not m.matches(node, m.Assign(targets=[m.AssignTarget(target=m.Name())])):
        return False
    name = cst.ensure_type(cst.ensure_type(node, cst.Assign).targets[0].target, cst.Name).value
    return name[0].isupper() and not name.isupper()


def mutants_of(root: Path, file: str, area: str, functions: Iterable[str] = ()) -> Iterator[Named]:
    """Every mutant of a file, or of the named functions in it.

    A name depends on the changed expression and its statement alone, so it survives changes
    elsewhere.
    """
    source = (root / file).read_text()
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)
    module = wrapper.module
    finder = _Finder(positions, len(source.splitlines()))
    module.visit(finder)
    lines = source.splitlines()
    seen = Counter()
    wanted = [
        set(range(positions[n].start.line, positions[n].end.line + 1))
        for n in m.findall(module, m.FunctionDef())
        if cst.ensure_type(n, cst.FunctionDef).name.value in functions
    ]
    assert len(wanted) >= len(list(functions)), f"{file} lacks some of {functions}"
    for node, changed, operator, statement, function in finder.found:
        if functions and not any(statement.start in span for span in wanted):
            continue
        text = "\n".join(lines[statement.start - 1 : statement.stop - 1])
        name = f"{file}|{operator}|{text}|{_code(module, node)}|{_code(module, changed)}"
        seen[name] += 1

        def make(
            node=node, changed=changed, operator=operator, statement=statement, function=function
        ) -> Mutant:
            after = cst.ensure_type(module.deep_replace(node, changed), cst.Module).code
            return _mutant(file, source, after, operator, statement, function, area)

        yield f"{name}|{seen[name]}", make


def _code(module: cst.Module, node: cst.CSTNode) -> str:
    """The node's text; of a statement with a body, the part that the operators change."""
    return module.code_for_node(node.test if isinstance(node, cst.If) else node)


def _mutant(
    file: str, before: str, after: str, operator: str, statement: range, function: range, area: str
) -> Mutant:
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    first = changes[0]
    last = changes[-1]
    old = before.splitlines()[first[1] : last[2]]
    new = after.splitlines()[first[3] : last[4]]
    stripped = (tuple(line.strip() for line in lines) for lines in (old, new))
    return Mutant(file, first[1] + 1, statement, function, operator, *stripped, before, after, area)


def replacement(root: Path, file: str, area: str, before: str, after: str) -> Mutant:
    """The change of a text that stands in a file once."""
    source = (root / file).read_text()
    assert source.count(before) == 1, f"{file} has {source.count(before)} times: {before}"
    start = source[: source.index(before)].count("\n") + 1
    statement = range(start, start + before.count("\n") + 1)
    whole = range(1, len(source.splitlines()) + 1)
    return _mutant(file, source, source.replace(before, after), "named", statement, whole, area)


def draw(areas: Iterable[list[Named]], number: int, least: int, seed: int) -> list[Mutant]:
    """`number` of the mutants, at least `least` of each area: those whose names have the smallest
    hashes with the seed.

    So the draw is even within an area, and beyond `least` over all; a change of the source replaces
    only mutants of what it changes. An area that has fewer than `least` gives all of its own.
    """

    def order(mutant: Named) -> bytes:
        return hashlib.sha256(f"{seed}|{mutant[0]}".encode()).digest()

    chosen: list[Named] = []
    others: list[Named] = []
    for mutants in areas:
        in_order = sorted(mutants, key=order)
        chosen += in_order[:least]
        others += in_order[least:]
    chosen += sorted(others, key=order)[: max(0, number - len(chosen))]
    return [make() for _, make in chosen]
