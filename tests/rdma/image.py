"""Parts of building the guest that need no program but Python: the choice of kernel modules, and the
initramfs itself.
"""

import os
import re
import shutil
import stat
import sys
from pathlib import Path

# crc32_pclmul is left out: under emulation the plain CRC, of every packet, is a third faster.
MODULES = [
    "rdma_rxe",
    "ib_uverbs",
    "veth",
    "9p",
    "9pnet_virtio",
    "virtio_pci",
    "virtio_rng",
    "virtio_net",
    "virtio_console",
    "crc32c_generic",
    "crc32c_intel",
    "crc32_generic",
    "libcrc32c",
    "sch_netem",
]


def modules(source: Path, target: Path) -> None:
    """Copy ``MODULES`` and the modules that these need."""
    paths = {f.name.split(".ko")[0].replace("-", "_"): f for f in (source / "kernel").rglob("*.ko*")}

    def info(path: Path, key: str) -> list[str]:
        pattern = rb"(?<=\0)" + key.encode() + rb"=([^\0]*)\0"
        return [m.decode() for m in re.findall(pattern, b"\0" + path.read_bytes())]

    done: set[str] = set()
    todo = list(MODULES)
    while todo:
        name = todo.pop().replace("-", "_")
        if name in done or name not in paths:
            continue  # built in, or not of this kernel
        done.add(name)
        for needs in info(paths[name], "depends"):
            todo += [x for x in needs.split(",") if x]
        for soft in info(paths[name], "softdep"):
            todo += soft.replace("pre:", " ").replace("post:", " ").split()
        to = target / paths[name].relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(paths[name], to)
    for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
        shutil.copy(source / name, target / name)


def cpio(root: Path, out: Path) -> None:
    """Write `root` as an uncompressed newc archive, which boots fastest."""
    number = 0
    with open(f"{out}.tmp", "wb") as archive:

        def put(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
            nonlocal number
            number += 1
            path = name.encode() + b"\0"
            fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
            head = b"070701" + b"".join(b"%08X" % f for f in fields) + path
            archive.write(head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4))

        put(".", 0o040755)
        for folder, folders, files in os.walk(root):
            for entry in sorted(folders) + sorted(files):
                path = Path(folder) / entry
                mode = path.lstat().st_mode
                name = str(path.relative_to(root))
                if stat.S_ISLNK(mode):
                    put(name, 0o120777, os.readlink(path).encode())
                elif stat.S_ISDIR(mode):
                    put(name, 0o040755)
                else:
                    put(name, 0o100000 | (mode & 0o7777), path.read_bytes())
        put("dev/console", 0o020600, device=(5, 1))
        put("dev/null", 0o020666, device=(1, 3))
        put("TRAILER!!!", 0)
    os.rename(f"{out}.tmp", out)


if __name__ == "__main__":
    {"modules": modules, "cpio": cpio}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
