"""Runs a command that can write nowhere but in one folder, start nothing but a few programs, and use no
network: Linux's Landlock, which needs no privilege. Runs as a program: the standard library only.

    restrict.py FOLDER PROGRAM[:PROGRAM...] COMMAND...

Exit code 125 where the system has no Landlock. See https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import ctypes
import glob
import os
import struct
import sys
from collections.abc import Sequence

NO_LANDLOCK = 125

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _TRUNCATE = 1 << 0, 1 << 1, 1 << 14
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
"""File rights by version of the interface: all up to making symbolic links, then refer, then truncate."""
_READ = 1 << 2 | 1 << 3
_NETWORK, _SCOPES = 0b11, 0b11
_NO_NEW_PRIVILEGES = 38


def _call(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))


def version() -> int:
    """Version of Landlock's interface; below 1 where there is none."""
    return _call(_CREATE, None, 0, 1) if sys.platform == "linux" else 0


def restrict(folder: str, programs: Sequence[str]) -> None:
    """Restrict this process and all that it starts.

    Raises:
        OSError: the system refuses.
    """
    abi = version()
    handled = _RIGHTS[min(4, abi)] & ~_READ
    network, scopes = _NETWORK if abi >= 4 else 0, _SCOPES if abi >= 6 else 0
    attributes = struct.pack("QQQ", handled, network, scopes)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = _call(_CREATE, ctypes.c_char_p(attributes), ctypes.c_size_t(size), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    loaders = [found for pattern in ("/lib*/ld-*", "/lib/*/ld-*") for found in glob.glob(pattern)]
    allowed = [(folder, handled)]
    allowed += [("/dev/null", handled & (_WRITE_FILE | _TRUNCATE))]
    allowed += [(os.path.realpath(program), _EXECUTE) for program in (*programs, *loaders)]
    for path, rights in allowed:
        _allow(rules, path, rights)
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if _call(_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    where = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("<Qi", rights, where)
    if _call(_ADD, rules, 1, ctypes.c_char_p(rule), 0):
        raise OSError(ctypes.get_errno(), f"landlock_add_rule {path}")
    os.close(where)


def main(argv: Sequence[str]) -> None:
    """Restrict, then become the command."""
    folder, programs, *command = argv
    try:
        if version() < 1:
            sys.exit(NO_LANDLOCK)
        restrict(folder, programs.split(":"))
    except OSError as error:
        sys.stderr.write(f"Landlock: {error}\n")
        sys.exit(NO_LANDLOCK)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
