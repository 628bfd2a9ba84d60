#!/bin/sh
# Make a file system that holds nothing but programs, and run a command in it.
# Runs as the first process of new mount, network, process, IPC and host-name namespaces (see sandbox.py), and stays the
# first: when it is killed, so is everything in them.
# Usage: sandbox.sh ROOT DISK_MIB PYTHON_PREFIX COMMAND…      ROOT: an empty folder
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin # not exported
root=$1 disk=$2 prefix=$3
shift 3

mount -t tmpfs -o size=1m,mode=755 sandbox "$root"
for folder in /usr /bin /sbin /lib /lib32 /lib64 "$prefix"; do
    if [ -L "$folder" ]; then
        ln -s "$(readlink "$folder")" "$root$folder"
    elif [ -d "$folder" ] && [ ! -e "$root$folder" ]; then
        mkdir -p "$root$folder"
        mount --bind -o ro "$folder" "$root$folder"
    fi
done
mkdir "$root/dev" "$root/proc" "$root/tmp"
for device in null zero urandom; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o "size=${disk}m,mode=1777,nosuid,nodev" sandbox "$root/tmp"

cd "$root"
mkdir tmp/outside
pivot_root . tmp/outside
umount -l /tmp/outside
rmdir /tmp/outside
mount -o remount,ro /
cd /tmp
"$@"
