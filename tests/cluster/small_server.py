"""Answers GET /health, and behaves as its arguments order: small_server.py PORT PID_FILE [BEHAVIOUR ...].

exit=N        end at once with this status, after a line of output
exit-once=N   the same, but only when PID_FILE is empty
late-again=S  listen after so many seconds, but at once when PID_FILE is empty
deaf          never listen
host=ADDRESS  listen there instead of 127.0.0.1
stubborn      ignore SIGTERM
family        start a child in a session of its own whose parent ends, and no process is left that knows it
--listen-fds N    accept connections from this inherited socket instead
--standby-fd N    first write PID_FILE.standby, and wait for a byte from this inherited pipe
litter        make a temporary file, shared memory and a semaphore, and do not remove them
"""

import http.server
import itertools
import os
import signal
import socket
import sys
import time

port, pid_file, behaviours = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
first = not os.path.exists(pid_file)


def note_pid():
    with open(pid_file, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")


note_pid()
for behaviour in behaviours:
    name, _, value = behaviour.partition("=")
    if name == "exit" or (name == "exit-once" and first):
        print("about to give up", flush=True)
        os._exit(int(value))
    if name == "late-again" and not first:
        time.sleep(float(value))
    if name == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if name == "family" and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note_pid()
            while True:
                time.sleep(60)
        os._exit(0)
if "litter" in behaviours:
    import multiprocessing.shared_memory
    import tempfile

    os.close(tempfile.mkstemp()[0])
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    with open(pid_file + ".litter", "w", encoding="utf-8") as file:
        file.write(
            f"{tempfile.gettempdir()}\n/dev/shm/{shared.name}\n/dev/shm/sem.{semaphore._semlock.name[1:]}\n"
        )
if "deaf" in behaviours:
    while True:
        time.sleep(60)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


flags = dict(itertools.pairwise(behaviours))
host = next((each.partition("=")[2] for each in behaviours if each.startswith("host=")), "127.0.0.1")
if "--standby-fd" in flags:
    with open(pid_file + ".standby", "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    if not os.read(int(flags["--standby-fd"]), 1):
        os._exit(5)
if "--listen-fds" in flags:
    server = http.server.ThreadingHTTPServer((host, port), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(flags["--listen-fds"]))
    server.server_activate()
else:
    server = http.server.ThreadingHTTPServer((host, port), Handler)
print(f"listening on {port}", flush=True)
server.serve_forever()
