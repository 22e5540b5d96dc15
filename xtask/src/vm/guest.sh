# Runs in the machine, in the host's file system: makes the devices, and runs the command.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
run=/run/posthorse-vm
# end, hugepages
. $run/settings

# The command gets pipes rather than the ports themselves: it may open /dev/stdout once more.
mkfifo /run/out /run/err
for port in /dev/vport*p1; do port=${port%1}; done
cat /run/out >"${port}1" &
cat /run/err >"${port}2" &
exec 3>/run/out 4>/run/err

# Says with which status all ends, and waits for the host to take the machine away. What is said comes after all that
# the command has written, even where one of its children still holds the pipes. A machine that stopped by itself could
# take with it what the host has not read yet.
finish() {
    printf '%s %s\n' "$end" "$1" >&3
    printf '%s %s\n' "$end" "$1" >&4
    while :; do sleep 1000; done
}
fail() {
    echo "vm: $*" >&4
    finish 125
}

number=0
while read -r folder; do
    mkdir -p "$folder"
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,access=any,cache=mmap "rw$number" "$folder" ||
        fail "$folder cannot be mounted"
    number=$((number + 1))
done <$run/rw

if [ "$hugepages" -gt 0 ]; then
    echo "$hugepages" >/proc/sys/vm/nr_hugepages
    read -r reserved </proc/sys/vm/nr_hugepages
    [ "$reserved" -eq "$hugepages" ] || fail "--hugepages is $hugepages; the machine has room for $reserved"
    mkdir -p /dev/hugepages
    mount -t hugetlbfs -o mode=1777 hugepages /dev/hugepages || fail "/dev/hugepages cannot be mounted"
fi

# Both ends of a wire are here: each answers for its own address alone, and takes what the other one sends.
for kind in all default; do
    cd /proc/sys/net/ipv4/conf/$kind || fail "there is no IPv4"
    echo 0 >rp_filter
    echo 1 >accept_local
    echo 1 >arp_ignore
    echo 2 >arp_announce
    # An address that must first prove unique would come late into the table of GIDs.
    echo 0 >/proc/sys/net/ipv6/conf/$kind/accept_dad
done
cd / || exit
# Ports below 1024, and echo requests, are free to all.
echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start

cat $run/links $run/peers.* >/run/network
ip -batch /run/network >/run/setup.log 2>&1 || fail "ip: $(cat /run/setup.log)"
rdma -b $run/devices >/run/setup.log 2>&1 || fail "rdma: $(cat /run/setup.log)"

# A link that went down forgets its routes and neighbours; they are back once it is up.
ip -oneline monitor link 2>/dev/null 3>&- 4>&- | while read -r _ link flags _; do
    link=${link%%[:@]*}
    case $flags in
    *[,\<]UP[,\>]*) [ ! -f "$run/peers.$link" ] || ip -force -batch "$run/peers.$link" 2>/dev/null ;;
    esac
done 3>&- 4>&- &

(
    exec 3>&- 4>&-
    ulimit -l unlimited
    ulimit -c 0
    . $run/command
) </dev/null >/run/out 2>/run/err
status=$?
sync
finish $status
