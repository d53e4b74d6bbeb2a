#!/bin/sh
# Build train with the library of an installed onnxruntime wheel: sh build.sh [PYTHON [FOLDER]]
set -eu
folder="${2:-$(dirname "$0")}"
library=$("${1:-python3}" -c 'import glob, os, onnxruntime
print(*glob.glob(os.path.join(os.path.dirname(onnxruntime.__file__), "capi", "libonnxruntime.so.*")))')
ln -sf "$library" "$folder/libonnxruntime.so.1" # the name that the library has in itself
"${CXX:-c++}" -std=c++17 -O2 -Wall -Wextra -o "$folder/train" "$(dirname "$0")/train.cpp" \
  "$folder/libonnxruntime.so.1" -Wl,-rpath,'$ORIGIN'
