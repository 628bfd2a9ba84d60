#!/bin/sh
# Make a file system that holds nothing but programs, and run a command in it.
# Runs as the first process of new mount, network, process, IPC and host-name namespaces (see sandbox.py), and stays the
# first: when it is killed, so is everything in them. Only root's rights within the namespaces are needed.
# Usage, in Python's own folder PREFIX: sandbox.sh DISK_MIB PREFIX COMMAND…
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin # not exported
disk=$1 prefix=$2
shift 2
root=/tmp # anything that is there; others still see what lies there

echo 1000 >/proc/self/oom_score_adj # short of memory, the kernel ends this before anything else
mount -t tmpfs -o size=1m,nr_inodes=512,mode=755 sandbox "$root"
mkdir "$root/dev" "$root/proc" "$root/tmp"
mount -t tmpfs -o "size=${disk}m,nr_inodes=4096,mode=1777,nosuid,nodev" sandbox "$root/tmp"
for folder in /usr /bin /sbin /lib /lib32 /lib64; do
    if [ -L "$folder" ]; then
        ln -s "$(readlink "$folder")" "$root$folder"
    elif [ -d "$folder" ]; then
        mkdir "$root$folder"
        mount --rbind "$folder" "$root$folder"
    fi
done
if [ ! -e "$root$prefix" ]; then
    mkdir -p "$root$prefix"
    mount --no-canonicalize --rbind . "$root$prefix" # by its path nobody may be able to reach it
fi
for device in null zero urandom; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
# Where a container hides a part of /proc, the kernel gives no other one: then there is none.
mount -t proc -o nosuid,nodev,noexec proc "$root/proc" 2>/dev/null || :

for place in $(cut -d ' ' -f 5 /proc/self/mountinfo); do
    case $place in
        "$root/tmp") ;;
        "$root" | "$root"/*) mount -o remount,bind,ro "$place" ;; # kernel settings in /proc, too
    esac
done

cd "$root"
mkdir tmp/outside
pivot_root . tmp/outside
umount -l /tmp/outside
rmdir /tmp/outside
cd /tmp
"$@"
