"""A fork of the tests' server ends as a Python program does: what it prints, what it waits for, and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from commands_in_forks import run_fork

PROGRAMS = {
    "to its end": "print('done')",
    "without a code": "sys.exit()",
    "with a code": "print('seven'); sys.exit(7)",
    "with a code of more than a byte": "sys.exit(258)",
    "with a negative code": "sys.exit(-1)",
    "with words": "sys.exit('no')",
    "with an object": "sys.exit([1, 2])",
    "by an error": "print('before'); int('x')",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "os.kill(os.getpid(), signal.SIGTERM)",
    "when its threads have ended": """
        threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()
        print('main')
    """,
    "by an error, when its threads have ended": """
        threading.Thread(target=lambda: (time.sleep(0.1), print('thread', file=sys.stderr))).start()
        sys.exit('main')
    """,
    "with the last registered first": """
        for word in ("first", "last"):
            atexit.register(print, word)
        threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()
    """,
    "with a handler that fails": "atexit.register(print, 'handler'); atexit.register(int, 'x'); print('main')",
    "with what it has not flushed": "sys.stdout.write('half a line'); sys.stderr.write('and')",
    "with nowhere to write": "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('lost')",
    "in spite of daemons": "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); print('main')",
}
IMPORTS = "import atexit, os, signal, sys, threading, time"


def run_text(text: str) -> None:
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("how", PROGRAMS)
def test_it_ends_as_a_program_does(how: str) -> None:
    text = f"{IMPORTS}\n{textwrap.dedent(PROGRAMS[how])}"
    fork = run_fork(run_text, "-c", args=(text,))
    program = subprocess.run([sys.executable, "-I", "-c", text], capture_output=True, text=True, check=False)
    assert (fork.returncode, fork.stdout) == (program.returncode, program.stdout), fork.stderr
    assert fork.stderr.splitlines()[-1:] == program.stderr.splitlines()[-1:]


def test_it_ends_with_its_temporary_files(tmp_path: os.PathLike[str]) -> None:
    """What is left to exit handlers and finalizers, as a program leaves it."""
    text = f"{IMPORTS}, tempfile\nkept = tempfile.TemporaryDirectory(dir={os.fspath(tmp_path)!r})"
    assert run_fork(run_text, "-c", args=(text,)).returncode == 0
    assert not os.listdir(tmp_path)
