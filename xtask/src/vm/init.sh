#!/bin/busybox sh
# The first program in the machine: mounts the host's file system, and goes on in it with guest.sh.
b=/bin/busybox
$b mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
$b mount -t proc proc /proc
failed() {
    echo "vm: $*"
    $b poweroff -f
}
while read -r module options; do
    # shellcheck disable=SC2086 # Options are several words.
    $b insmod "/modules/$module" $options || failed "the module $module cannot be loaded"
done </modules/order

# What lies in a read-only share is hardly looked up twice: the guest may keep all of it.
share=trans=virtio,version=9p2000.L,msize=512000,access=any,cache=loose,ro
$b mount -t 9p -o $share root /lower || failed "the host's root cannot be mounted"
$b mount -t tmpfs -o size=75% upper /upper
$b mkdir /upper/files /upper/work
layers=lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work
$b mount -t overlay -o $layers root /merged || failed "there is no overlay on the host's root"

$b mount -t proc proc /merged/proc
$b mount -t sysfs sys /merged/sys
$b mount -t devtmpfs dev /merged/dev
$b mkdir -p /merged/dev/pts /merged/dev/shm
$b mount -t devpts devpts /merged/dev/pts
$b mount -t tmpfs -o mode=1777 shm /merged/dev/shm
$b ln -s /proc/self/fd /merged/dev/fd
$b ln -s fd/0 /merged/dev/stdin
$b ln -s fd/1 /merged/dev/stdout
$b ln -s fd/2 /merged/dev/stderr
$b mount -t tmpfs -o mode=755 run /merged/run
$b mkdir /merged/run/posthorse-vm /merged/run/lock
$b chmod 1777 /merged/run/lock
$b mount -t 9p -o $share run /merged/run/posthorse-vm || failed "the run's folder cannot be mounted"
$b chroot /merged /bin/sh /run/posthorse-vm/guest.sh </dev/null
failed "guest.sh ended"
