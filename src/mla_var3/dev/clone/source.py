"""Source text of a version package under new names: only real identifiers change.

A module is read as a syntax tree, so that a name inside a longer name, in a comment, as a keyword
or as a local variable stays. Edits go into the original text, whose form is otherwise kept.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mla_var3.dev.clone.names import Module, PackageNames, import_base
from mla_var3.dev.clone.text import describe_clone
from mla_var3.errors import InvalidArgumentError

COMPOSITES = ("KernelPipeline", "ConcurrentKernels")
"""Runtime objects that are given their name as a string."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_OWN_SCOPE = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ClassDef,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def rewrite(module: Module, names: PackageNames) -> str:
    """The module's text with every name of the package in its new form."""
    return _Rewriter(module, names).result()


@dataclass(frozen=True)
class _Scope:
    """Names that a function, class or comprehension binds itself."""

    bound: frozenset[str]
    is_class: bool = False


class _Rewriter:
    """Collects the edits of one module."""

    def __init__(self, module: Module, names: PackageNames) -> None:
        self.module = module
        self.names = names
        self.edits: dict[tuple[int, int], str] = {}
        lines = module.text.split("\n")
        self._lines = lines
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line) + 1)
        self._starts = starts
        self._tokens = list(tokenize.generate_tokens(io.StringIO(module.text).readline))
        self._modules = self._imported_modules()
        self._class = ""

    def result(self) -> str:
        self._docstring(self.module.tree)
        self._each(self.module.tree.body, ())
        text = self.module.text
        for (start, end), new in sorted(self.edits.items(), reverse=True):
            text = text[:start] + new + text[end:]
        return text

    # --- positions --------------------------------------------------------------------------------

    def _offset(self, line: int, byte_column: int) -> int:
        """Character offset of a position as syntax trees give it, in bytes of UTF-8."""
        text = self._lines[line - 1].encode()[:byte_column].decode()
        return self._starts[line - 1] + len(text)

    def _span(self, node: ast.expr | ast.stmt | ast.alias) -> tuple[int, int]:
        if node.end_lineno is None or node.end_col_offset is None:
            raise AssertionError("parsed nodes have an end")
        start = self._offset(node.lineno, node.col_offset)
        return start, self._offset(node.end_lineno, node.end_col_offset)

    def _words(self, node: ast.stmt) -> Iterator[tuple[str, int]]:
        """The names and keywords of a statement with their offsets."""
        start, end = self._span(node)
        for token in self._tokens:
            at = self._starts[token.start[0] - 1] + token.start[1]
            if token.type == tokenize.NAME and start <= at < end:
                yield token.string, at

    def _replace(self, start: int, old: str, new: str) -> None:
        if old == new:
            return
        if not self.module.text.startswith(old, start):
            # Before Python 3.12 the parser misplaces names in some f-strings.
            raise InvalidArgumentError("source", f"{old} where its syntax tree says", "other text")
        self.edits[start, start + len(old)] = new

    # --- names ------------------------------------------------------------------------------------

    def _imports(self, node: ast.Import | ast.ImportFrom) -> list[tuple[str, tuple[str, ...]]]:
        """Names that an import binds, with the absolute path of what each stands for."""
        if isinstance(node, ast.ImportFrom):
            base = import_base(self.module, node, self.names.package)
            return [(alias.asname or alias.name, (*base, alias.name)) for alias in node.names]
        paths = [(alias.asname, tuple(alias.name.split("."))) for alias in node.names]
        return [(name, path) if name else (path[0], path[:1]) for name, path in paths]

    def _is_ours(self, path: tuple[str, ...]) -> bool:
        return self.names.below(path) is not None

    def _imported_modules(self) -> dict[str, tuple[str, ...]]:
        """Names that stand for modules of the package, with the paths of these."""
        return {
            name: path
            for node in ast.walk(self.module.tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name, path in self._imports(node)
            if self.names.below(path) in self.names.modules
        }

    def _is_global(self, name: str, scopes: tuple[_Scope, ...]) -> bool:
        inner = scopes[-1:]
        outer = tuple(scope for scope in scopes[:-1] if not scope.is_class)
        return not any(name in scope.bound for scope in (*outer, *inner))

    def _new(self, name: str, scopes: tuple[_Scope, ...]) -> str:
        return self.module.renames.get(name, name) if self._is_global(name, scopes) else name

    def _scope(
        self,
        body: Iterable[ast.AST],
        arguments: ast.arguments | None = None,
        is_class: bool = False,
    ) -> _Scope:
        bound: set[str] = set()
        released: set[str] = set()
        if arguments is not None:
            bound |= {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)}
        for node in _own_nodes(body):
            match node:
                case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    bound.add(name)
                case ast.ClassDef(name=name):
                    bound.add(name)
                case ast.Import() | ast.ImportFrom():
                    # What comes from the package is renamed wherever it is imported.
                    own = {name for name, path in self._imports(node) if self._is_ours(path)}
                    bound |= {name for name, _ in self._imports(node)} - own
                case ast.ExceptHandler(name=str(name)):
                    bound.add(name)
                case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    bound.add(name)
                case ast.MatchMapping(rest=str(name)):
                    bound.add(name)
                case ast.Global(names=listed):
                    released |= set(listed)
        return _Scope(frozenset(bound - released), is_class)

    # --- the walk ---------------------------------------------------------------------------------

    def _each(
        self, nodes: Iterable[ast.AST | None], scopes: tuple[_Scope, ...], annotation: bool = False
    ) -> None:
        for node in nodes:
            if node is not None:
                self._visit(node, scopes, annotation)

    def _visit(self, node: ast.AST, scopes: tuple[_Scope, ...], annotation: bool = False) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, scopes)
            case ast.ClassDef():
                self._definition(node, scopes)
                self._docstring(node)
                self._each([*node.decorator_list, *node.bases, *node.keywords], scopes)
                outside, self._class = self._class, node.name
                self._each(node.body, (*scopes, self._scope(node.body, is_class=True)))
                self._class = outside
            case ast.Lambda():
                self._each([*node.args.defaults, *node.args.kw_defaults], scopes)
                self._visit(node.body, (*scopes, self._scope([node.body], node.args)))
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                scope = self._scope([generator.target for generator in node.generators])
                self._visit(node.generators[0].iter, scopes)
                self._each(ast.iter_child_nodes(node), (*scopes, scope))
            case ast.AnnAssign():
                self._visit(node.annotation, scopes, annotation=True)
                self._each([node.target, node.value], scopes)
            case ast.Import():
                for alias in node.names:
                    self._dotted_text(alias)
            case ast.ImportFrom():
                self._import_from(node)
            case ast.Global():
                for word, at in self._words(node):
                    self._replace(at, word, self.module.renames.get(word, word))
            case ast.Name():
                self._replace(self._span(node)[0], node.id, self._new(node.id, scopes))
            case ast.Attribute():
                self._attribute(node, scopes)
            case ast.Call():
                self._call(node, scopes)
            case ast.Assign(
                targets=[ast.Name(id="__all__")],
                value=ast.List(elts=entries) | ast.Tuple(elts=entries),
            ):
                for entry in entries:
                    self._string(entry, self.module.renames)
            case ast.Subscript(value=ast.Name(id="Literal") | ast.Attribute(attr="Literal")):
                self._each(ast.iter_child_nodes(node), scopes)
            case ast.Constant(value=str()):
                if annotation:
                    self._quoted_annotation(node, scopes)
                else:
                    self._quoted_path(node)
            case _:
                self._each(ast.iter_child_nodes(node), scopes, annotation)

    def _function(self, node: _Function, scopes: tuple[_Scope, ...]) -> None:
        self._definition(node, scopes)
        self._docstring(node)
        arguments = node.args
        self._each([*node.decorator_list, *arguments.defaults, *arguments.kw_defaults], scopes)
        annotations = [a.annotation for a in ast.walk(arguments) if isinstance(a, ast.arg)]
        self._each([*annotations, node.returns], scopes, annotation=True)
        self._each(node.body, (*scopes, self._scope(node.body, arguments)))

    def _definition(self, node: _Function | ast.ClassDef, scopes: tuple[_Scope, ...]) -> None:
        words = self._words(node)
        for word, _ in words:
            if word in ("def", "class"):
                break
        name, at = next(words)
        new = self._new(name, scopes)
        if scopes and scopes[-1].is_class and isinstance(node, _Function):
            new = self.module.methods.get(self._class, {}).get(name, name)
        self._replace(at, name, new)

    def _import_from(self, node: ast.ImportFrom) -> None:
        base = import_base(self.module, node, self.names.package)
        named = node.module.split(".") if node.module else []
        if named:
            old = base[len(base) - len(named) :]
            # A relative import may name the package itself or parts of the way to it.
            new = self.names.renamed(base)[-len(named) :]
            words = [(word, at) for word, at in self._words(node) if word != "from"]
            for (word, at), before, after in zip(words, old, new, strict=False):
                if word == before:
                    self._replace(at, before, after)
        for alias in node.names:
            new_name = self.names.renamed((*base, alias.name))[-1]
            self._replace(self._span(alias)[0], alias.name, new_name)

    def _dotted_text(self, alias: ast.alias) -> None:
        new = ".".join(self.names.renamed(tuple(alias.name.split("."))))
        self._replace(self._span(alias)[0], alias.name, new)

    def _attribute(self, node: ast.Attribute, scopes: tuple[_Scope, ...]) -> None:
        """`stage.CtStage`, also by the full path, where `stage` is a module of the package.

        And `self.kernel`, `Host.kernel` and `Host(...).kernel`, where `Host` is a class whose
        kernels are methods of it.
        """
        methods = self._methods_of(node.value, scopes)
        if node.attr in methods:
            self._replace(self._span(node)[1] - len(node.attr), node.attr, methods[node.attr])
            self._visit(node.value, scopes)
            return
        chain = [node.attr]
        value: ast.expr = node.value
        while isinstance(value, ast.Attribute):
            chain.insert(0, value.attr)
            value = value.value
        if isinstance(value, ast.Name) and self._is_global(value.id, scopes):
            path = (*self._modules.get(value.id, (value.id,)), *chain)
            new = self.names.renamed(path)[-1]
            self._replace(self._span(node)[1] - len(node.attr), node.attr, new)
        self._visit(node.value, scopes)

    def _methods_of(self, value: ast.expr, scopes: tuple[_Scope, ...]) -> Mapping[str, str]:
        """Renamed methods of what an expression stands for, as far as its text tells."""
        if isinstance(value, ast.Call):
            value = value.func
        if not isinstance(value, ast.Name):
            return {}
        if value.id in ("self", "cls"):
            return self.module.methods.get(self._class, {})
        return self.module.methods.get(value.id, {}) if self._is_global(value.id, scopes) else {}

    def _call(self, node: ast.Call, scopes: tuple[_Scope, ...]) -> None:
        function = ast.unparse(node.func).split(".")[-1]
        self._visit(node.func, scopes)
        if function in COMPOSITES:
            given = [k.value for k in node.keywords if k.arg in ("_name", "pipeline_name")]
            for name in [*node.args[:1], *given]:
                self._string(name, self.names.labels)
        self._each(node.args[:1], scopes, annotation=function == "cast")
        self._each([*node.args[1:], *node.keywords], scopes)

    # --- strings ----------------------------------------------------------------------------------

    def _content(self, node: ast.expr) -> tuple[str, int]:
        """Text of a plain literal and its offset; empty when it is spelled in any other way."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            start, end = self._span(node)
            if self.module.text[start + 1 : end - 1] == node.value:
                return node.value, start + 1
        return "", 0

    def _string(self, node: ast.expr, renames: Mapping[str, str]) -> None:
        text, at = self._content(node)
        self._replace(at, text, renames.get(text, text))

    def _quoted_path(self, node: ast.Constant) -> None:
        text, at = self._content(node)
        self._replace(at, text, ".".join(self.names.renamed(tuple(text.split(".")))))

    def _quoted_annotation(self, node: ast.Constant, scopes: tuple[_Scope, ...]) -> None:
        text, at = self._content(node)
        try:
            expression = ast.parse(text, mode="eval")
        except SyntaxError:
            return
        for name in ast.walk(expression):
            if isinstance(name, ast.Name):
                column = len(text.encode()[: name.col_offset].decode())
                self._replace(at + column, name.id, self._new(name.id, scopes))

    def _docstring(self, node: ast.Module | ast.ClassDef | _Function) -> None:
        match node.body:
            case [ast.Expr(value=ast.Constant(value=str()) as constant), *_]:
                start, end = self._span(constant)
                old = self.module.text[start:end]
                new = describe_clone(
                    old,
                    of_module=isinstance(node, ast.Module),
                    words=self.names.labels,
                    phrases=self.names.phrases,
                    quoted=self._quotable(),
                )
                self._replace(start, old, new)

    def _quotable(self) -> dict[str, str]:
        """Names that a docstring of this module may quote: of kernels, modules and classes."""
        designs = {self.names.package[-1], self.names.package[-2]}
        every = {**self.names.labels, **self.module.renames}
        return {old: new for old, new in every.items() if old not in designs}


def _own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of a scope without what lies in scopes of its own inside it."""
    for node in body:
        yield node
        if not isinstance(node, _OWN_SCOPE):
            yield from _own_nodes(ast.iter_child_nodes(node))
