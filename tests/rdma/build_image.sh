#!/bin/bash
# Builds a Debian 12 guest with Soft-RoCE and pyverbs, and a private qemu unless one is on PATH. Touches nothing
# outside of its folder and needs no root: packages come from the host's own apt sources and are only unpacked.
# usage: build_image.sh WORKDIR      exit: 0 built, 77 cannot be built here (the last line says why)
set -euo pipefail
W=$1; HERE=$(cd "$(dirname "$0")" && pwd); B=$W/build; OUT=$W/image
skip(){ echo "SKIP: $*"; exit 77; }
for tool in apt-get dpkg-deb tar python3; do command -v $tool >/dev/null || skip "$tool is absent"; done
mkdir -p "$B" "$OUT"

# apt with a state of its own
A=$B/apt; mkdir -p "$A"/{lists/partial,cache/archives/partial}; : > "$A/status.empty"
APT=(-q -o Dir::State::lists="$A/lists" -o Dir::Cache="$A/cache" -o APT::Get::List-Cleanup=0
     -o APT::Install-Recommends=0 -o APT::Sandbox::User=root -o Debug::NoLocking=1 -o Acquire::Languages=none)
compgen -G "$A/lists/*Packages*" >/dev/null || apt-get "${APT[@]}" update >/dev/null || skip "apt-get update failed"
closure(){ local st=$1; shift; apt-get "${APT[@]}" -o Dir::State::status="$st" -s install "$@" | awk '/^Inst /{print $2}'; }
fetch(){ mkdir -p "$1.tmp"; (cd "$1.tmp" && shift && apt-get "${APT[@]}" download "$@" >/dev/null) && mv "$1.tmp" "$1"; }
unpack(){ dpkg-deb --fsys-tarfile "$1" | tar -x --keep-directory-symlink --no-same-owner -C "$2" "${@:3}"; }
BULK=(--exclude=./usr/share/doc* --exclude=./usr/share/man* --exclude=./usr/share/locale* --exclude=./usr/share/perl*
      --exclude=./usr/share/zoneinfo* --exclude=*/gconv* --exclude=*/numpy/*/tests)

if ! command -v qemu-system-x86_64 >/dev/null && [ ! -x "$W/host/usr/bin/qemu-system-x86_64" ]; then
  [ -d "$B/hostdebs" ] || fetch "$B/hostdebs" $(closure /var/lib/dpkg/status qemu-system-x86) || skip "qemu is not to be had"
  mkdir -p "$W/host"
  for d in "$B"/hostdebs/*.deb; do unpack "$d" "$W/host" "${BULK[@]}"; done
fi

WANT="linux-image-amd64 python3 python3-pyverbs python3-numpy ibverbs-providers iproute2 kmod busybox-static bash libstdc++6"
DROP='^(perl.*|lib.*perl.*|usrmerge|init-system-helpers|sysvinit-utils|debconf|libpam.*|libsemanage.*|libsepol.*|passwd|adduser|lsb-base|udev|rdma-core|dpkg|tar|coreutils|initramfs-tools.*|klibc-utils|libklibc|linux-base|linux-image-amd64|logsave|cpio|libgdbm.*|libdb5.*|libaudit-common|gcc-12-base|libtirpc-common|readline-common|media-types)$'
[ -d "$B/guestdebs" ] || fetch "$B/guestdebs" $(closure "$A/status.empty" $WANT | grep -Ev "$DROP") || skip "the guest's packages are not to be had"

R=$B/rootfs; K=$B/kernel; rm -rf "$R" "$K"
mkdir -p "$R"/usr/{bin,sbin,lib,lib64} "$R"/{dev,proc,sys,tmp,run,etc,root,site} "$K"
for x in bin sbin lib lib64; do ln -s usr/$x "$R/$x"; done
for d in "$B"/guestdebs/*.deb; do
  case $(basename "$d") in
    linux-image-*) dpkg-deb --fsys-tarfile "$d" | tar -x --no-same-owner -C "$K" ./boot ./lib/modules;;
    *) unpack "$d" "$R" "${BULK[@]}";;
  esac
done
# What the packages' scripts would have done: library links, a python, busybox's names, users, module index.
for l in blas lapack; do for f in "$R"/usr/lib/x86_64-linux-gnu/$l/lib*.so.3; do ln -sf "$l/${f##*/}" "$R/usr/lib/x86_64-linux-gnu/"; done; done
[ -e "$R/usr/bin/python3" ] || ln -s python3.11 "$R/usr/bin/python3"
/sbin/ldconfig -r "$R" 2>/dev/null || true
for a in $("$R/bin/busybox" --list); do [ -e "$R/bin/$a" ] || [ -e "$R/sbin/$a" ] || ln -s busybox "$R/bin/$a"; done
printf 'root:x:0:0:root:/root:/bin/sh\n' > "$R/etc/passwd"; printf 'root:x:0:\n' > "$R/etc/group"
printf '127.0.0.1 localhost\n' > "$R/etc/hosts"
V=$(ls "$K/lib/modules")
python3 "$HERE/image.py" modules "$K/lib/modules/$V" "$R/usr/lib/modules/$V"
"$R/lib64/ld-linux-x86-64.so.2" --library-path "$R/usr/lib/x86_64-linux-gnu" --argv0 depmod "$R/bin/kmod" -b "$R" "$V"
install -m 755 "$HERE/guest/init" "$R/init"
cp "$K/boot/vmlinuz-$V" "$OUT/vmlinuz"
python3 "$HERE/image.py" cpio "$R" "$OUT/initrd.img"
