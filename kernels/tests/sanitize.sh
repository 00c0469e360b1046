#!/bin/sh
# Usage: PYTHON=python sanitize.sh FOLDER. Builds the kernels under the sanitizers into FOLDER and runs their tests:
# the C++ ones under address + undefined behaviour, the pool's under thread, then those in Python under the first two.
set -eu
kernels=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
PYTHON=${PYTHON:-python3}
case $PYTHON in */*) PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON") ;; esac

build() {  # name, value of HK_SANITIZE
  cmake -S "$kernels" -B "$folder/$1" -DCMAKE_BUILD_TYPE=Debug -DHK_TESTS=ON -DHK_SANITIZE="$2"
  cmake --build "$folder/$1" --parallel
}
build address ON
ctest --test-dir "$folder/address" --output-on-failure
build thread thread
ctest --test-dir "$folder/thread" --output-on-failure -R pool

# Python itself is not built with the sanitizer, so its library comes first; Python's own leaks are not ours.
mkdir -p "$folder/python/hyflash_kernels"
cp "$kernels/hyflash_kernels/"*.py "$folder/address/libhyflash_kernels.so" "$folder/python/hyflash_kernels"
cd "$kernels"
LD_PRELOAD="$("${CXX:-c++}" -print-file-name=libasan.so) $("${CXX:-c++}" -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$folder/python" PYTHONMALLOC=malloc "$PYTHON" -P -c '
import sys
# An editable install would come before PYTHONPATH.
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
import hyflash_kernels, pytest
print("under test:", hyflash_kernels.library()._name)
# Not those that count memory or limit it, nor the C++ ones, which have run.
unfit = "not too_many_threads and not leave_no_thread and not tests_in_cpp and not linked_into_another"
sys.exit(pytest.main(["tests", "-p", "no:cacheprovider", "-k", unfit]))
'
