"""A Python that has imported torch and nothing else, and forks a process for every program it is
sent: the import takes longer than most of the programs.

Run as a script, with the number of a socket as its one argument; helpers.py is the other side.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # torch imports it in the first call of a meta function


def next_program(listener: socket.socket) -> dict[str, Any]:
    """Returns in a new process for every request, and there only. Ends this one when its stdin
    does."""
    while True:
        if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
            sys.exit()
        connection, _ = listener.accept()
        data, files, *_ = socket.recv_fds(connection, 1, 3)
        while not data.endswith(b"\0"):
            data += connection.recv(1 << 20)
        # one process more waits for the program, so that this one can go on
        if not os.fork():
            listener.close()
            program = os.fork()
            if not program:
                connection.close()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                    os.close(file)
                request: dict[str, Any] = json.loads(data[:-1].strip())
                return request
            for file in (0, 1, 2, *files):
                os.close(file)
            connection.sendall(f"{program}\n".encode())
            if json.loads(data[:-1].strip())["ends_with_client"]:
                threading.Thread(target=kill_at_end, args=(connection, program),
                                 daemon=True).start()
            status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
            with contextlib.suppress(OSError):         # nobody may be there any more
                connection.sendall(f"{status}\n".encode())
            os._exit(0)
        connection.close()
        for file in files:
            os.close(file)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def kill_at_end(connection: socket.socket, program: int) -> None:
    """Kills the program once nobody holds the other end of the connection."""
    connection.recv(1)
    os.kill(program, signal.SIGKILL)


def run(words: list[str], environ: dict[str, str], folder: str, paths: list[str]) -> None:
    """Runs `python *words` in this process."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    if "OMP_NUM_THREADS" in environ:           # torch read it long ago
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    first = {"-c": "", "-m": folder}.get(words[0], os.path.dirname(words[0]))
    given = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *filter(None, given), *paths]
    sys.orig_argv[:] = [sys.executable, *words]
    importlib.invalidate_caches()
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        scope = vars(sys.modules["__main__"])
        for name in [n for n in scope if not n.startswith("__")]:
            del scope[name]
        exec(compile(words[1], "<string>", "exec"), scope)
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    gc.collect()
    gc.freeze()                                # no program looks through what torch has made
    with socket.socket(fileno=int(sys.argv[1])) as server:
        wanted = next_program(server)
    run(wanted["words"], wanted["environ"], wanted["folder"], sys.path[1:])
