"""What another user of this machine can open of a running cluster: nobody.py PID,... PATH...

Prints a line for each file that could be read or written, each socket that could be connected to, and each
process that could be looked into.
"""

import contextlib
import os
import socket
import stat
import sys


def openable(path):
    mode = os.lstat(path).st_mode
    if stat.S_ISSOCK(mode):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
        return "connected"
    if stat.S_ISREG(mode):
        for flags, what in ((os.O_RDONLY, "read"), (os.O_WRONLY, "written")):
            with contextlib.suppress(PermissionError):
                os.close(os.open(path, flags))
                return what
    return None


assert os.geteuid() != 0
for pid in sys.argv[1].split(","):
    with contextlib.suppress(PermissionError, FileNotFoundError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            print(f"process {pid}: descriptor {name}")
    with contextlib.suppress(PermissionError, FileNotFoundError):
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
        print(f"process {pid}: memory")
for root in sys.argv[2:]:
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    for path in [root, *paths]:
        with contextlib.suppress(OSError):
            if (what := openable(path)) is not None:
                print(f"{path}: {what}")
