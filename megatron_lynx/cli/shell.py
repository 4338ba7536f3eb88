"""Just enough of a shell to read a launch script: statements, variables, arrays, quoting.

Nothing is executed. Command substitutions become empty words, conditions and loops are read as if
every statement in them ran once. An unset variable is looked up in ``environment``; if it is not
there either, it is empty, and ``Script.unset`` names it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

_ASSIGN = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\\(?P<escaped>[$\"`\\])"
    r"|\$\{(?P<name>[A-Za-z_]\w*|[0-9])(?:\[(?P<index>[@*0-9]+)\])?(?:(?P<op>:?[-=+])(?P<other>[^{}]*))?\}"
    r"|\$(?P<bare>[A-Za-z_]\w*|[0-9@*])"
    r"|\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)"
    r"|\$\((?P<command>[^()]*(?:\([^()]*\)[^()]*)*)\)"
)
_KEYWORDS = frozenset(
    {
        *("if", "then", "else", "elif", "fi", "for", "while", "until", "do", "done", "case", "esac"),
        *("select", "function", "{", "}", "!", "time", "in"),
    }
)
_PREFIXES = frozenset({"export", "declare", "local", "readonly", "typeset"})


@dataclass(slots=True)
class Script:
    """What a script says: ``commands`` are its statements, expanded and split into words.

    ``unset`` names the variables that were used without a value.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    variables: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    unset: set[str] = field(default_factory=set)


def read_script(text: str, environment: Mapping[str, str] | None = None) -> Script:
    """Read a shell script, or a bare list of arguments over any number of lines."""
    script = Script(environment=environment or {})
    for words in _statements(text):
        _run(words, script)
    return script


def _statements(text: str) -> list[list[str]]:
    """Raw words (quotes still on) of each statement; an array's parentheses stay one statement."""
    text = text.replace("\\\r\n", " ").replace("\\\n", " ")
    found: list[list[str]] = [[]]
    word, quote, depth, i = "", "", 0, 0
    while i < len(text):
        c = text[i]
        if quote:
            word += c
            if c == "\\" and quote == '"' and i + 1 < len(text):
                i += 1
                word += text[i]
            elif c == quote:
                quote = ""
        elif c == "\\" and i + 1 < len(text):
            word += text[i : i + 2]
            i += 1
        elif c in "'\"":
            quote, word = c, word + c
        elif c == "(":
            depth, word = depth + 1, word + c
        elif c == ")":
            depth, word = max(0, depth - 1), word + c
        elif c == "#" and (not word or word[-1] in " \n\t("):
            while i + 1 < len(text) and text[i + 1] != "\n":
                i += 1
        elif depth:
            word += c
        elif c in " \t\n;&|":
            if word:
                found[-1].append(word)
            word = ""
            if c not in " \t" and found[-1]:
                found.append([])
        else:
            word += c
        i += 1
    if word:
        found[-1].append(word)
    return [words for words in found if words]


def _run(words: list[str], script: Script) -> None:
    """Take one statement in: assignments into the variables, anything else as a command."""
    while words and words[0] in _KEYWORDS:
        words = words[1:]
    if words and words[0] in _PREFIXES:
        words = [word for word in words[1:] if not word.startswith("-")]
    while words and (match := _ASSIGN.fullmatch(words[0])):
        name, plus, value = match.groups()
        if value.startswith("(") and value.endswith(")"):
            parts = _statements(value[1:-1])
            new = [item for part in parts for raw in part for item in expand(raw, script)]
        else:
            new = [" ".join(expand(value, script, split=False))]
        if plus and not value.startswith("("):
            old = script.variables.get(name, [""])
            script.variables[name] = [old[0] + new[0], *old[1:]]
        else:
            script.variables[name] = script.variables.get(name, []) + new if plus else new
        words = words[1:]
    if words:
        script.commands.append([item for raw in words for item in expand(raw, script)])


def expand(raw: str, script: Script, *, split: bool = True) -> list[str]:
    """The words that a raw word becomes: quotes off, variables in, split where a shell would."""
    array = re.fullmatch(r'"?\$\{([A-Za-z_]\w*)\[[@*]\]\}"?', raw)
    if array:
        values = _lookup(array.group(1), script)
        quoted = raw.startswith('"')
        return values if quoted else [word for value in values for word in value.split()]
    pieces = re.findall(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?:[^'\"\\]|\\.)+", raw, re.DOTALL)
    words, open_word = [""], bool(pieces)
    for piece in pieces:
        if piece[0] == "'":
            words[-1] += piece[1:-1]
        elif piece[0] == '"':
            words[-1] += _substitute(piece[1:-1], script)
        else:
            value = _substitute(piece, script)
            if not split or "$" not in piece:
                words[-1] += re.sub(r"\\(.)", r"\1", value)
                continue
            parts = value.split()
            if value[:1].isspace() and words[-1]:
                words.append("")
            words[-1] += parts[0] if parts else ""
            words += parts[1:]
    return words if any(words) or (open_word and raw[:1] in "'\"") else []


def _lookup(name: str, script: Script) -> list[str]:
    if name in script.variables:
        return script.variables[name]
    if name in script.environment:
        return [script.environment[name]]
    script.unset.add(name)
    return []


def _substitute(text: str, script: Script) -> str:
    """``text`` with its variables, defaults and sums replaced by their values."""

    def value(match: re.Match[str]) -> str:
        part = match.groupdict()
        if part["escaped"]:
            return part["escaped"]
        if part["sum"] is not None:
            return _arithmetic(part["sum"], script)
        if part["command"] is not None:
            return ""
        name = part["name"] or part["bare"]
        known = name in script.variables or name in script.environment
        if part["op"]:
            wanted = _substitute(part["other"], script).strip("\"'")
            found = " ".join(_lookup(name, script)) if known else ""
            if part["op"].endswith("+"):
                return wanted if found else ""
            return found or wanted
        values = _lookup(name, script)
        if part["index"] in ("@", "*"):
            return " ".join(values)
        index = int(part["index"] or 0)
        return values[index] if index < len(values) else ""

    return _VARIABLE.sub(value, text)


def _arithmetic(text: str, script: Script) -> str:
    """The value of a sum such as ``$N * M``; empty if it is more than +, -, *, / and %."""
    filled = _substitute(text, script)
    filled = re.sub(r"[A-Za-z_]\w*", lambda m: " ".join(_lookup(m.group(), script)) or "0", filled)
    tokens = re.findall(r"\d+|[-+*/%()]|\S", filled)
    try:
        number, rest = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return ""
    return "" if rest else str(number)


def _sum(tokens: list[str]) -> tuple[int, list[str]]:
    number, rest = _product(tokens)
    while rest and rest[0] in "+-":
        sign = 1 if rest[0] == "+" else -1
        other, rest = _product(rest[1:])
        number += sign * other
    return number, rest


def _product(tokens: list[str]) -> tuple[int, list[str]]:
    number, rest = _atom(tokens)
    while rest and rest[0] in "*/%":
        operator = rest[0]
        other, rest = _atom(rest[1:])
        number = number * other if operator == "*" else number // other if operator == "/" else number % other
    return number, rest


def _atom(tokens: list[str]) -> tuple[int, list[str]]:
    if tokens[0] == "(":
        number, rest = _sum(tokens[1:])
        if rest[0] != ")":
            raise ValueError("unbalanced parenthesis")
        return number, rest[1:]
    if tokens[0] == "-":
        number, rest = _atom(tokens[1:])
        return -number, rest
    return int(tokens[0]), tokens[1:]


def words_of(command: list[str]) -> list[str]:
    """The words of a command, with a command line inside one word (``sh -c "..."``) split too."""
    found: list[str] = []
    for word in command:
        inside = " --" in f" {word}" and any(c.isspace() for c in word.strip())
        try:
            found += shlex.split(word) if inside else [word]
        except ValueError:
            found += word.split()
    return found
