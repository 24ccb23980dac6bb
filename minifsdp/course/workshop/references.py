"""The reference answers: each exercise's function, its hints, and the functions that an answer may not call."""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any, Protocol, TypeVar

from minifsdp.course.workshop.catalogue import exercise_file, exercise_files, lab_of

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Reference:
    """One exercise's reference answer.

    Attributes:
        id: lab and number, such as "5.2".
        function: the answer. It uses only the names of its lab's set-up cell.
        hints: two, the second stronger.
        forbids: functions that solve the exercise under another name, such as one of `minifsdp`'s.
        source: the function's text, without the decorator that registers it.
    """

    id: str
    function: Callable[..., Any]
    hints: tuple[str, str]
    forbids: tuple[Callable[..., Any], ...]
    source: str

    @property
    def name(self) -> str:
        return str(self.function.__name__)


_references: dict[str, Reference] = {}


def reference(exercise: str, hints: tuple[str, str], forbids: tuple[Callable[..., Any], ...] = ()) -> Callable[[F], F]:
    """Register the decorated function as the reference answer of an exercise."""

    def register(function: F) -> F:
        _references[exercise] = Reference(exercise, function, hints, forbids, written(function))
        return function

    return register


def written(function: Callable[..., Any]) -> str:
    """The text of a function without its decorators."""
    text = textwrap.dedent(inspect.getsource(function))
    return "".join(text.splitlines(keepends=True)[definition_in(text, function.__name__).lineno - 1 :])


def find_reference(exercise: str) -> Reference:
    """The reference answer of an exercise.

    Raises:
        ValueError: there is no such exercise; the message lists those of its lab.
    """
    if exercise not in _references:
        exercise_file(exercise)
        import_module(f"minifsdp.answers.lab{lab_of(exercise)}")
    return _references[exercise]


def lab_references(lab: str) -> list[Reference]:
    """The references of a lab ("05") in the order of its exercises; none if there is no such lab."""
    return [find_reference(exercise) for exercise in exercise_files(lab)]


def parse(source: str) -> ast.Module:
    """The syntax tree of a cell from an untrusted notebook.

    Raises:
        SyntaxError: the cell is not Python, or nested too deep to parse.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except SyntaxError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error) or "too deep") from None


def definition_in(source: str, name: str) -> ast.FunctionDef:
    """The last definition of function `name` at the top level of `source`.

    Raises:
        ValueError: there is no such definition.
        SyntaxError: the source is not Python.
    """
    for node in reversed(parse(source).body):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise ValueError(f"the cell does not define {name}")


class Named(Protocol):
    """A function's name and text: a reference or a shipped stub."""

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> str: ...


def is_blank(source: str, exercise: Named) -> bool:
    """True if a cell's answer is still the shipped stub: the exercise's signature with `...` as its body.

    Decorators, docstrings, comments, layout and other functions in the cell are ignored. `pass` and `return None` count
    as answers, and so does a cell that is not Python or does not define the function.
    """
    stub = definition_in(exercise.source, exercise.name)
    stub.body = [ast.Expr(ast.Constant(...))]
    try:
        return _tree(definition_in(source, exercise.name)) == _tree(stub)
    except (SyntaxError, ValueError, RecursionError):
        return False


def _tree(function: ast.FunctionDef) -> str:
    function.decorator_list = []
    if len(function.body) > 1 and ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    return ast.dump(function)


@contextmanager
def forbidden(ref: Reference) -> Iterator[None]:
    """Make the reference and every function that it `forbids` raise when called, under any name."""
    functions = {_plain(function) for function in (ref.function, *ref.forbids)}
    codes = {function: function.__code__ for function in functions}
    for function in functions:
        function.__code__ = _refusal(f"{function.__name__} is the answer to {ref.id}: write it yourself", function)
    try:
        yield
    finally:
        for function, code in codes.items():
            function.__code__ = code


def _plain(function: Callable[..., Any]) -> FunctionType:
    plain = inspect.unwrap(function)
    assert isinstance(plain, FunctionType), f"{function} has no Python code to replace"
    return plain


def _refusal(message: str, function: FunctionType) -> Any:
    """A code object that raises. It needs the function's free variables, or Python rejects the assignment."""
    free = function.__code__.co_freevars
    body = f"def refuse(*args, **kwargs):\n  {'; '.join(free) or 'pass'}\n  raise RuntimeError({message!r})"
    source = f"def make({', '.join(free)}):\n" + textwrap.indent(body + "\nreturn refuse", "  ")
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["make"](*free).__code__
