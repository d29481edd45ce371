#!/bin/sh
# The tests of the CPU library for aarch64: compiled by a cross compiler and executed under user-mode emulation.
#
#   sh tests/arm/run.sh build/arm python -m pytest tests/plugins/cpu
#
# Runs a command with an interpreter of Debian's arm64 and the packages of constraints/arm.txt, which are fetched into the
# folder once (1 GB); nothing is installed on this machine. It wants Debian 12 or its like with the packages qemu-user
# and gcc-aarch64-linux-gnu, and any interpreter with pip first on PATH.
set -eu
mkdir -p "$1"
work=$(cd "$1" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
shift 2

for tool in qemu-aarch64 aarch64-linux-gnu-gcc apt-get dpkg-deb; do
  command -v $tool > /dev/null || { echo "make arm needs $tool: apt-get install qemu-user gcc-aarch64-linux-gnu" >&2; exit 2; }
done

if [ ! -e "$work/fetched" ]; then
  mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$work/root"
  touch "$work/status"
  apt() {
    apt-get -q -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o Dir::State::lists="$work/lists" \
      -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root "$@"
  }
  apt update
  libraries="libc6 libgcc-s1 libstdc++6 libgomp1 libexpat1 zlib1g libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libcrypt1"
  (cd "$work/debs" && apt download python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib $libraries)
  for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$work/root"; done
  python -m pip install -q --no-deps --target "$work/site" -r "$root/constraints/arm.txt" --only-binary=:all: \
    --python-version 3.11 --implementation cp --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 --platform manylinux_2_31_aarch64
  touch "$work/fetched"
fi

# -mcpu=native is the library's way to name this processor; under emulation it is one with BF16's dot products.
cat > "$work/cc" << 'COMPILER'
#!/bin/sh
for argument; do
  shift
  [ "$argument" != -mcpu=native ] || argument=-mcpu=neoverse-v1
  set -- "$@" "$argument"
done
exec aarch64-linux-gnu-gcc "$@"
COMPILER
chmod +x "$work/cc"

# Processes that the tests start are executed under emulation too: sys.executable is this script.
cat > "$work/python3.11" << INTERPRETER
#!/bin/sh
exec qemu-aarch64 -0 "\$0" -L "$work/root" "$work/root/usr/bin/python3.11" "\$@"
INTERPRETER
chmod +x "$work/python3.11"

export PYTHONHOME="$work/root/usr" PYTHONPATH="$work/site:$root" D2SD_CC="$work/cc" D2SD_CACHE="$work/cache" PYTHONDONTWRITEBYTECODE=1
exec "$work/python3.11" "$@"
