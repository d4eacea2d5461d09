"""A clock that is off: a library that a host's processes load before the C library's (LD_PRELOAD).

It covers every program that asks the C library for the time of day (Python, OpenSSL, Redis, ``date``), and
waits until a time of day. It does not cover programs that are linked statically or call the kernel
themselves, nor the kernel's own time stamps: the times of files. Clocks that count from a start, by which
timeouts are measured, are right, as they are on a machine whose time of day is wrong.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

SOURCE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name)) dlsym(RTLD_NEXT, #name)

static long off(void) {
    static long seconds, known;
    if (!known) { const char *text = getenv("LAB_CLOCK_OFF"); seconds = text ? atol(text) : 0; known = 1; }
    return seconds;
}

int clock_gettime(clockid_t which, struct timespec *at) {
    REAL(clock_gettime);
    int failed = real(which, at);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) at->tv_sec += off();
    return failed;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

/* A deadline of less than thirty years is one by a clock that counts from the machine's start. */
static struct timespec right(const struct timespec *until) {
    struct timespec found = *until;
    if (found.tv_sec > 1000000000) found.tv_sec -= off();
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec at = right(until);
    return real(c, m, &at);
}

int sem_timedwait(sem_t *s, const struct timespec *until) {
    REAL(sem_timedwait);
    struct timespec at = right(until);
    return real(s, &at);
}
"""


def why_not() -> str | None:
    """Why no clock can be put off on this machine; None where one can."""
    return None if shutil.which("cc") else "there is no C compiler (cc) for clocks that are off"


def built(folder: Path) -> Path:
    """The library, compiled into a folder.

    Raises:
        CalledProcessError, FileNotFoundError: there is no compiler, or it failed.
    """
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(SOURCE, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return library


def environment(library: Path, seconds: float) -> dict[str, str]:
    """The environment for processes whose clock is off by so many seconds."""
    return {"LD_PRELOAD": str(library), "LAB_CLOCK_OFF": str(round(seconds))}
