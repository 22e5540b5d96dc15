# Runs in a machine with two hosts and two rails: checks the devices, and that a rail is one of its own.
set -eu
fail() {
    echo "failed: $*"
    exit 1
}
# What becomes true in a while, at most some 10 s.
soon() {
    left=100
    until "$@"; do
        left=$((left - 1))
        [ $left -gt 0 ] || return 1
        sleep 0.1
    done
}
# 20 messages there and back between two devices.
pingpong() {
    timeout 20 ibv_rc_pingpong -d "$1" -g 1 -n 20 >/tmp/server 2>&1 &
    server=$!
    # Until the server listens, there is nobody to talk to.
    soon client "$2" || return 1
    wait $server
}
client() {
    timeout 20 ibv_rc_pingpong -d "$1" -g 1 -n 20 127.0.0.1 >/tmp/client 2>&1 || ! kill -0 $server 2>/dev/null
}
answers() { busybox ping -c 1 -W 1 -I "$1" "$2" >/dev/null 2>&1; }
silent() { ! answers "$@"; }
sent() { cat "/sys/class/net/$1/statistics/tx_packets"; }
active() { grep -q ACTIVE "/sys/class/infiniband/$1/ports/1/state"; }
routed() { ip route show table 100 | grep -q "dev a0"; }

[ "$POSTHORSE_VM $POSTHORSE_VM_HOSTS $POSTHORSE_VM_RAILS" = "1 2 2" ] || fail "the variables POSTHORSE_VM"
[ "$(ulimit -l)" = unlimited ] || fail "locked memory is limited"
[ "$(ls /sys/class/infiniband | tr '\n' ' ')" = "rxe0 rxe1 rxe2 rxe3 " ] || fail "$(ls /sys/class/infiniband)"
[ "$(cat /sys/class/infiniband/rxe3/parent)" = b1 ] || fail "rxe3 is not on b1"
for device in rxe0 rxe1 rxe2 rxe3; do soon active $device || fail "$device is not active"; done

before=$(sent a0)
pingpong rxe0 rxe2 || fail "rail 0: $(cat /tmp/server /tmp/client)"
[ "$(sent a0)" -ge $((before + 20)) ] || fail "what rail 0 sends crosses no wire"
answers 10.77.0.1 10.77.0.2 || fail "10.77.0.2 does not answer"

if [ "$1" = mesh ]; then
    pingpong rxe0 rxe3 || fail "rail 0 to rail 1: $(cat /tmp/server /tmp/client)"
    answers 10.77.0.1 10.77.1.2 || fail "10.77.1.2 does not answer over the switch"
else
    silent 10.77.0.1 10.77.1.2 || fail "rail 0 reaches rail 1"
fi

ip link set a0 down
silent 10.77.0.1 10.77.0.2 || fail "10.77.0.2 answers without a wire"
if pingpong rxe0 rxe2; then fail "rail 0 works without a wire"; fi
pingpong rxe1 rxe3 || fail "rail 1 without rail 0: $(cat /tmp/server /tmp/client)"
ip link set a0 up
soon active rxe0 && soon active rxe2 && soon routed || fail "rail 0 does not come back"
pingpong rxe0 rxe2 || fail "rail 0 mended: $(cat /tmp/server /tmp/client)"

tc qdisc add dev a0 root netem delay 1ms loss 0.1% || fail "netem"
pingpong rxe0 rxe2 || fail "rail 0 with netem: $(cat /tmp/server /tmp/client)"
tc qdisc replace dev a0 root tbf rate 100mbit burst 100kb latency 50ms || fail "tbf"
[ "$(cat /proc/sys/vm/nr_hugepages)" = 8 ] && grep -q /dev/hugepages /proc/mounts || fail "huge pages"
echo "all is well"
