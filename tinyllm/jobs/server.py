"""Imported by the fork server, to remove the folder of its socket at its exit."""

import atexit
import os
import shutil
from multiprocessing import forkserver
from pathlib import Path
from typing import Any


def sweep(here: int, server: Any) -> None:
    """Remove the folder, if this process is `here` and the server.

    The process that started the server removes it too, unless it was killed.
    """
    address = getattr(server, "_forkserver_address", None)
    is_server = os.getpid() == here and getattr(server, "_forkserver_pid", None) is None
    if is_server and isinstance(address, str) and (folder := Path(address).parent).name.startswith("pymp-"):
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(sweep, os.getpid(), getattr(forkserver, "_forkserver", None))
