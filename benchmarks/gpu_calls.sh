#!/bin/sh
# A quarter of an hour of a GPU machine without a package index, in four commands of which the next follows at once:
#
#   with an index:   make data FROM=...; for pack in triton weights compiled; do sh benchmarks/gpu_pack.sh pack $pack; done
#   there, call 1:   sh benchmarks/gpu_calls.sh 1   # brings triton/1 and compiled/1; begins to time steps
#          2, 3:     sh benchmarks/gpu_calls.sh 2   # brings weights/1, and weights/2; the steps go on meanwhile
#          4:        sh benchmarks/gpu_calls.sh 4   # brings weights/3; builds the bundles, then the real pair, then the rest
#
# `packs N` names the folders that call N brings. What runs is a copy of call 1's checkout, in RUN, in a session of its
# own: the calls behind it bring files only. Call 4 leaves its figures in OUT, and what there is of them every few seconds.
set -eu
cd "$(dirname "$0")/.."
RUN=${RUN:-$HOME/.cache/d2sd-gpu/run} OUT=${OUT:-build/gpu}
PACKS=${PACKS:-build/packs}
SECONDS_LEFT=${SECONDS_LEFT:-560} # of call 4

packs() {
    case $1 in
    1) echo "$PACKS/triton/1 $PACKS/compiled/1" ;;
    2 | 3) echo "$PACKS/weights/$(($1 - 1))" ;;
    4) echo "$PACKS/weights/3" ;;
    esac
}

suite() { # FOLDER ARGUMENTS...
    name=$1 && shift
    sh benchmarks/gpu_suite.sh --out "$RUN/$name" "$@" >>"$RUN/$name.log" 2>&1 || echo "$name: exit status $?" >>"$RUN/$name.log"
}

harvest() {
    for name in geometry pair more; do
        for file in gpu.json gpu.md; do
            [ ! -e "$RUN/$name/$file" ] || cp "$RUN/$name/$file" "$OUT/$name.${file#gpu.}"
        done
    done
    find "$RUN" -maxdepth 3 -name '*.log' ! -path '*/repo/*' | tar -czf "$OUT/logs.tgz" -P -T - 2>/dev/null || true
}

left() { echo $((began + SECONDS_LEFT - $(date +%s))); }

for part in $(packs "$1"); do sh benchmarks/gpu_pack.sh take "$part"; done
case $1 in
1)
    rm -rf "$RUN" && mkdir -p "$RUN" && cp -r . "$RUN/repo" && cd "$RUN/repo"
    sh benchmarks/gpu_pack.sh unpack
    setsid sh "$RUN/repo/benchmarks/gpu_calls.sh" geometry </dev/null >/dev/null 2>&1 &
    sleep 4
    ;;
geometry)
    suite geometry --call 1 --budget "${GEOMETRY:-240}"
    touch "$RUN/geometry.done"
    ;;
2 | 3) tail -n 3 "$RUN/geometry.log" ;;
4)
    began=$(date +%s)
    mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) && cd "$RUN/repo"
    (while sleep 5; do harvest; done) &
    harvester=$!
    suite pair --part bundles --until 9e9
    while [ ! -e "$RUN/geometry.done" ] && [ "$(left)" -gt 330 ]; do sleep 1; done
    rm -f "$RUN/pair/gpu.json"
    suite pair --call 2 --budget $(($(left) > 400 ? 400 : $(left) - 20))
    [ "$(left)" -lt 60 ] || suite more --parts layers pytest --only checks --budget $(($(left) > 120 ? 100 : $(left) - 20))
    [ "$(left)" -lt 60 ] || suite more --parts exact passes --only times --budget $(($(left) > 120 ? 100 : $(left) - 20))
    [ "$(left)" -lt 60 ] || suite more --parts times --budget $(($(left) - 20))
    kill $harvester
    harvest
    tail -n 60 "$RUN/pair.log"
    ;;
esac
