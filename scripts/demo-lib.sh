# SPDX-License-Identifier: Apache-2.0
# What the demos share: building, one server on the loopback interface, and taking everything down again, also when
# interrupted. To be sourced by a script in this folder, which runs in the repository's root.
#
# Sets: work (a folder of the run's own), bin (where the programs are), programs (what `build` builds), server_pid,
# trainer_pid (empty: none), grpc and http (the server's addresses, once it is started).

# A build without CUDA is quicker, and all that a machine without a GPU can use.
preset=cpu-only
if [ -e /dev/nvidia0 ] && { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } >/dev/null; then
  preset=release
fi
bin=build/$preset/bin
work=$(mktemp -d "${TMPDIR:-/tmp}/lossd-demo.XXXXXX")
programs=(lossd ngram_lm_demo)
server_pid= trainer_pid= grpc= http=

# Ends a process of ours: politely, then not.
stop() {
  local pid=$1
  if ! kill -TERM "$pid" 2>/dev/null; then return 0; fi
  for _ in $(seq 100); do
    if ! kill -0 "$pid" 2>/dev/null; then break; fi
    sleep 0.1
  done
  kill -KILL "$pid" 2>/dev/null || true
  wait "$pid" 2>/dev/null || true
}

clean_up() {
  local status=$?
  trap - EXIT
  trap '' INT TERM HUP
  if [ -n "$trainer_pid" ]; then
    stop "$trainer_pid"
    echo
  fi
  if [ -n "$server_pid" ]; then stop "$server_pid"; fi
  rm -rf "$work"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

headline() { printf '\n== %s\n' "$1"; }

# Runs a command; its output appears only if it fails.
quietly() {
  if ! "$@" >"$work/log" 2>&1; then
    tail -n 50 "$work/log" >&2
    exit 2
  fi
}

# build [GROUP...]: compiles the programs, which need neither tests nor benchmarks. The groups of packages are those of
# install-deps, besides `build`.
build() {
  headline "building ($preset)"
  scripts/install-deps build "$@"
  quietly cmake --preset "$preset" -DLOSSD_TESTS=OFF -DLOSSD_BENCH=OFF -DLOSSD_EXAMPLES=ON
  local compile=(cmake --build --preset "$preset" -j "$(nproc)" --target "${programs[@]}")
  if [ -t 1 ]; then "${compile[@]}"; else quietly "${compile[@]}"; fi
}

server_failed() {
  echo "lossd $1; its log:" >&2
  tail -n 30 "$work/server.log" >&2
  exit 3
}

# An address out of the file in which the server says where it listens.
address() { sed -nE "s/.*\"$1\" *: *\"([^\"]*)\".*/\\1/p" "$work/ports"; }

# http_get PATH: writes what the server answers to GET PATH into $work/answer; fails unless it answers 200 within 20 s.
http_get() {
  local status
  {
    printf 'GET %s HTTP/1.0\r\n\r\n' "$1" >&3 && timeout 20 cat <&3 >"$work/response"
  } 2>/dev/null 3<>"/dev/tcp/${http%:*}/${http##*:}" || return 1
  read -r _ status _ <"$work/response" || return 1
  sed '1,/^\r$/d' "$work/response" >"$work/answer"
  [ "$status" = 200 ]
}

# start_server [FLAG...]: starts lossd, on free ports unless flags say otherwise, and waits until it is ready.
start_server() {
  mkdir -p "$work/checkpoints"
  rm -f "$work/ports"
  "$bin/lossd" --listen=127.0.0.1:0 --http=127.0.0.1:0 --port_file="$work/ports" \
    --checkpoint_dir="$work/checkpoints" --threads="$(nproc)" "$@" >>"$work/server.log" 2>&1 &
  server_pid=$!
  for _ in $(seq 200); do
    if ! kill -0 "$server_pid" 2>/dev/null; then server_failed "ended at once"; fi
    if [ -s "$work/ports" ]; then break; fi
    sleep 0.1
  done
  if [ ! -s "$work/ports" ]; then server_failed "did not come up in 20 s"; fi
  grpc=$(address grpc) http=$(address http)
  if ! http_get /readyz; then server_failed "does not answer /readyz with 200"; fi
}

# Has the server drain, and fails if that does not end well.
stop_server() {
  headline "stopping lossd (SIGTERM)"
  kill -TERM "$server_pid"
  local ended=0
  wait "$server_pid" || ended=$?
  server_pid=
  if [ "$ended" != 0 ]; then server_failed "ended with status $ended"; fi
  echo "lossd drained and ended with status 0"
}
