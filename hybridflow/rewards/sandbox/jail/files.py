"""The file system a program sees: a private root, or its folder on the machine's own; and the removal of what it left."""

from __future__ import annotations

import itertools
import os
import sys

from . import linux

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
HOME = "/tmp"  # the program's folder in a private root
MAX_ENTRIES = 4096  # files and folders a program may make
# statvfs flags of a mount and the mount(2) flags that keep them: a user namespace may not drop them
KEPT_FLAGS = {
    2: linux.MS_NOSUID, 4: linux.MS_NODEV, 8: linux.MS_NOEXEC,
    1024: linux.MS_NOATIME, 2048: linux.MS_NODIRATIME, 4096: linux.MS_RELATIME,
}  # fmt: skip


def readable_paths() -> list[str]:
    """What a Python program needs to read: the system's libraries, the interpreter's tree, and where else its libraries lie."""
    paths = [path for path in SYSTEM if os.path.exists(path)]
    loaded = {line.split(maxsplit=5)[-1].strip() for line in linux.read("/proc/self/maps").splitlines() if ".so" in line}
    folders = sorted({os.path.dirname(os.path.realpath(path)) for path in loaded if path.startswith("/")})
    for needed in [os.path.realpath(sys.base_prefix), *folders]:
        if not any(needed == path or needed.startswith(path + "/") for path in paths):
            paths.append(needed)
    return paths


def _bind(path: str, root: str, flags: int) -> None:
    """The same path below `root`: a symbolic link again, or a read-only view."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    linux.mount(path, target, flags=linux.MS_BIND | linux.MS_REC)
    present = os.statvfs(target).f_flag
    kept = sum(flag for bit, flag in KEPT_FLAGS.items() if present & bit)
    linux.mount(None, target, flags=linux.MS_BIND | linux.MS_REMOUNT | linux.MS_NOSUID | flags | kept)


def enter_private_root(folder: str, disk_bytes: int) -> None:
    """Makes a tmpfs over `folder` this process's root. OSError: not allowed here; the old root is still in place."""
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    options = f"size={disk_bytes},nr_inodes={MAX_ENTRIES},mode=0755"
    linux.mount("tmpfs", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    try:
        for path in readable_paths():
            _bind(path, folder, linux.MS_RDONLY | linux.MS_NODEV)
        for path in DEVICES:
            _bind(path, folder, 0)
        os.makedirs(folder + HOME, exist_ok=True)
        os.makedirs(folder + "/proc")
        _mount_proc(folder + "/proc")
        os.chdir(folder)
        linux.pivot_root(".", ".")
    except OSError:
        linux.umount(folder)
        raise
    linux.umount(".")  # the old root lies over the new one at this point
    os.chdir("/")


def _mount_proc(target: str) -> None:
    try:
        linux.mount("proc", target, "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    except OSError:
        return  # containers with a masked /proc forbid another; few programs read it


def used(folder: str, limit: int) -> bool:
    """Whether the files below `folder` take more than `limit` bytes, are more than MAX_ENTRIES, or hide from being counted."""
    total = entries = 0
    pending = [folder]
    while pending:
        try:
            found = list(itertools.islice(os.scandir(pending.pop()), MAX_ENTRIES + 1))
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError:
            return True  # a folder without rights, or deeper than a path name reaches
        for entry in found:
            entries += 1
            if entries > MAX_ENTRIES:
                return True
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
                continue
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except OSError:
                continue
    return total > limit


def remove_tree(folder: str) -> None:
    """Removes a folder whatever was made in it: trees deeper than a path name or a recursion may be, folders without rights."""
    names = (f"{os.urandom(8).hex()}" for _ in itertools.count())
    while os.path.isdir(folder) and not os.path.islink(folder):
        for entry in os.scandir(folder):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in os.scandir(entry.path):
                if inner.is_dir(follow_symlinks=False):  # lifted to the top, so that no path grows long
                    os.chmod(inner.path, 0o700)
                    os.rename(inner.path, f"{folder}/{next(names)}")
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
        if not os.listdir(folder):
            os.rmdir(folder)
