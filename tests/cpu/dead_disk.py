"""A directory that stops to answer, as one of a file server that is gone: a library for LD_PRELOAD, made by the C compiler."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Calls below DEAD_DIRECTORY block for ever once DEAD_TRIGGER exists. The first call for a path that contains DEAD_FROM makes it.
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void pass(const char *path) {
    const char *dead = getenv("DEAD_DIRECTORY"), *trigger = getenv("DEAD_TRIGGER"), *from = getenv("DEAD_FROM");
    if (!path || !dead || !trigger || strncmp(path, dead, strlen(dead))) return;
    if (from && strstr(path, from)) close(syscall(SYS_openat, AT_FDCWD, trigger, O_CREAT | O_WRONLY, 0600));
    if (syscall(SYS_faccessat, AT_FDCWD, trigger, F_OK) == 0) for (;;) pause();
}
static void pass_fd(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (n > 0) { path[n] = 0; pass(path); }
}
#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define OPEN(name) int name(const char *p, int f, ...) { \
    va_list a; va_start(a, f); int m = va_arg(a, int); va_end(a); pass(p); REAL(name); return real(p, f, m); }
OPEN(open) OPEN(open64)
#define STAT(name, kind) int name(const char *p, struct kind *s) { pass(p); REAL(name); return real(p, s); }
STAT(stat, stat) STAT(stat64, stat64) STAT(lstat, stat) STAT(lstat64, stat64)
int mkdir(const char *p, mode_t m) { pass(p); REAL(mkdir); return real(p, m); }
int access(const char *p, int m) { pass(p); REAL(access); return real(p, m); }
int rename(const char *p, const char *q) { pass(p); REAL(rename); return real(p, q); }
int unlink(const char *p) { pass(p); REAL(unlink); return real(p); }
int fsync(int fd) { pass_fd(fd); REAL(fsync); return real(fd); }
ssize_t write(int fd, const void *b, size_t n) { pass_fd(fd); REAL(write); return real(fd, b, n); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { pass_fd(fd); REAL(pwrite); return real(fd, b, n, o); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t o) { pass_fd(fd); REAL(pwrite64); return real(fd, b, n, o); }
"""


def library(where: Path) -> Path:
    """The library, compiled. Skips where nothing compiles it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (where / "dead_disk.c").write_text(SOURCE)
    made = where / "dead_disk.so"
    line = [compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(where / "dead_disk.c"), "-ldl"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the C library does not compile here: {done.stderr[:200]}")
    return made


def surroundings(made: Path, directory: Path, trigger: Path, first: str = "") -> dict[str, str]:
    """The environment in which `directory` dies once `trigger` exists, or with the first call for a path with `first` in it."""
    found = {"LD_PRELOAD": str(made), "DEAD_DIRECTORY": os.fspath(directory), "DEAD_TRIGGER": os.fspath(trigger)}
    return found | ({"DEAD_FROM": first} if first else {})
