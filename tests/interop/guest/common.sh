# SPDX-License-Identifier: BSD-3-Clause
# For the scripts that run in a guest of the rig. BUILD is the build folder; $work is in the guest's memory.
set -u
work=$(mktemp -d /tmp/interop.XXXXXX)
failed=0
rtrsd_pid=
nbdkit_pid=

# check NAME COMMAND...: the command is a function of the script; any step that fails ends it.
check() {
  local name=$1 status
  shift
  ( set -e; "$@" ) > "$work/check.log" 2>&1
  status=$?
  if (( status == 77 )); then
    echo "skip $name: $(tail -n 1 "$work/check.log")"
  elif (( status == 0 )); then
    echo "ok   $name"
  else
    echo "FAIL $name (status $status)"
    tail -n 40 "$work/check.log" | sed 's/^/     /'
    if [[ -f $work/rtrsd.log ]]; then tail -n 15 "$work/rtrsd.log" | sed 's/^/     rtrsd: /'; fi
    if [[ -f $work/nbdkit.log ]]; then grep -v debug: "$work/nbdkit.log" | tail -n 10 | sed 's/^/     nbdkit: /'; fi
    dmesg | grep -iE 'rtrs|rnbd|rxe' | tail -n 10 | sed 's/^/     kernel: /'
    failed=1
  fi
}

skip() {
  echo "$1"
  exit 77
}

# within SECONDS COMMAND...: until it succeeds.
within() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    if (( SECONDS >= end )); then
      echo "not within the time: $*" >&2
      return 1
    fi
    sleep 0.2
  done
}

fails() {
  if "$@"; then
    echo "should have failed: $*" >&2
    return 1
  fi
}

# start_rtrsd [YAML LINE...]: serves $work/v1.img (64 MiB) and v2, v3 by rdma: and tcp: on $RIG_IP.
start_rtrsd() {
  {
    printf 'listen: ["rdma:%s:1234", "tcp:%s:1235"]\n' "$RIG_IP" "$RIG_IP"
    (( $# == 0 )) || printf '%s\n' "$@"
    echo 'volumes:'
    echo "  - { name: v1, path: $work/v1.img, size: 64MiB }"
    echo "  - { name: v2, path: $work/v2.img, size: 16MiB }"
    echo "  - { name: v3, path: $work/v3.img, size: 16MiB, read-only: false }"
  } > "$work/rtrsd.yaml"
  "$BUILD/daemon/rtrsd" -v -c "$work/rtrsd.yaml" >> "$work/rtrsd.log" 2>&1 &
  rtrsd_pid=$!
  disown
  echo "$rtrsd_pid" > "$work/rtrsd.pid"
  within 20 grep -q 'serving' "$work/rtrsd.log"
}

stop_rtrsd() {
  kill "$(cat "$work/rtrsd.pid")" 2> /dev/null || return 0
  within 40 eval '! kill -0 $(cat "$work/rtrsd.pid") 2> /dev/null'
  mv "$work/rtrsd.log" "$work/rtrsd.log.old"
}

# start_nbdkit KEY=VALUE...: the plugin; its socket is $work/nbd.sock.
start_nbdkit() {
  rm -f "$work/nbd.sock"
  nbdkit -v -f -U "$work/nbd.sock" "$BUILD/plugin/nbdkit-rtrs-plugin.so" "$@" > "$work/nbdkit.log" 2>&1 &
  nbdkit_pid=$!
  disown
  echo "$nbdkit_pid" > "$work/nbdkit.pid"
  uri="nbd+unix:///?socket=$work/nbd.sock"
  within 20 test -S "$work/nbd.sock"
}

stop_nbdkit() {
  kill "$(cat "$work/nbdkit.pid")" 2> /dev/null || return 0
  within 40 eval '! kill -0 $(cat "$work/nbdkit.pid") 2> /dev/null'
}

# The protection domains, queues and memory regions that rtrsd holds of RDMA devices.
held_by_rtrsd() {
  local kind
  for kind in pd cq qp mr; do rdma resource show "$kind" | grep 'comm rtrsd'; done
}

# When every session has ended: nothing of their chunks, keys and queue pairs may be left.
nothing_left() {
  within 60 eval 'test "$(grep -c "ended after" "$work/rtrsd.log")" = "$(grep -c "is up" "$work/rtrsd.log")"'
  held_by_rtrsd || true
  within 20 fails held_by_rtrsd
}
