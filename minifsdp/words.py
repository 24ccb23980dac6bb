"""Dataclasses as words, `name=value,name`, and back; what a user writes by mistake is refused in a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields
from typing import Any

_NAMES = {"kind": "data"}  # of fields whose words differ
_KINDS = {int: "a whole number", bool: "True or False", str: "a string", tuple: "a tuple of strings"}


def words_of(part: type) -> dict[str, Field[Any]]:
    """The fields of a part of a recipe, by the words for them."""
    return {_NAMES.get(each.name, each.name): each for each in fields(part)}


def split(text: str) -> list[str]:
    """
    Raises:
        ValueError: words are not separated by commas.
    """
    words = [re.sub(r"\s*([=/])\s*", r"\1", word.strip()) for word in text.split(",")]
    if blank := next((word for word in words if len(word.split()) > 1), ""):
        raise ValueError(f"{blank}: separate words by commas, as in {','.join(blank.split())}")
    return [word for word in words if word]


def named(word: str) -> tuple[str, str]:
    """A word's name and value.

    Raises:
        ValueError: the name or the value is left out.
    """
    name, equals, value = word.partition("=")
    if not name:
        raise ValueError(f"{word} has no name: write one before it, as in dp=2")
    if equals and not value:
        raise ValueError(f"{word} has no value: write one behind it, or leave the word out")
    return name, value if equals else "yes"


def made(part: Any, words: Mapping[str, str]) -> Any:
    """A part of a recipe from its words.

    Raises:
        ValueError: a value is impossible, or has no effect.
    """
    values = {(of := words_of(part)[name]).name: _value(name, text, of.default) for name, text in words.items()}
    found = part(**values)
    if idle := [word for word in getattr(found, "idle", ()) if word in words]:
        word = worded(idle[0], getattr(found, words_of(part)[idle[0]].name))
        raise ValueError(f"{word} has no effect with {','.join(said(found, True))}: leave it out")
    return found


def check_kinds(part: Any) -> None:
    """
    Raises:
        TypeError: a value is not of the kind of its field's default.
    """
    for word, each in words_of(type(part)).items():
        value, usual = getattr(part, each.name), each.default
        kind = int if usual is None else type(usual)
        if value is not usual and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise TypeError(f"{word}={value!r} is of type {type(value).__name__}: give {_KINDS[kind]}")


def refuse_idle(part: Any, where: str) -> None:
    """
    Raises:
        ValueError: a value has no effect.
    """
    for word in part.idle:
        if (value := getattr(part, word)) != words_of(type(part))[word].default:
            raise ValueError(f"{worded(word, value)} has no effect with {where}: leave it out")


def _value(name: str, text: str, default: Any) -> Any:
    """A value as its field has it, whose default is given."""
    if isinstance(default, bool):
        check(name, text, ("yes", "no"))
        return text == "yes"
    if isinstance(default, tuple):
        return tuple(text.split("/"))
    if isinstance(default, str):
        return text
    if default is None and text == "all":
        return None
    if text == "yes":
        raise ValueError(f"{name} has no number: write one behind it, as in {name}=2")
    if not text.isdecimal():
        raise ValueError(f"{name}={text}: give a whole number, such as {name}=2")
    return int(text)


def said(part: Any, alone: bool = False) -> Iterator[str]:
    """The words for what is not as usual, and the first one if its axis does not say that the part is there."""
    for number, (name, each) in enumerate(words_of(type(part)).items()):
        value = getattr(part, each.name)
        if value == each.default and name != "data" and not (alone and number == 0):
            continue
        yield worded(name, value)


def worded(name: str, value: Any) -> str:
    """A word, as `made` reads it."""
    if isinstance(value, bool):
        return name if value else f"{name}=no"
    if value is None:
        return f"{name}=all"
    return f"{name}={'/'.join(value) if isinstance(value, tuple) else value}"


def check(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value}: choose from {', '.join(known)}")
