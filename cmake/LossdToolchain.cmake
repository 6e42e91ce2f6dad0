# SPDX-License-Identifier: Apache-2.0
# Language level, warnings and sanitizers, the same for every target of ours; whether CUDA is there; the packages that lossd stands
# on, all from the distribution (scripts/install-deps lists them).

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  # Clones share what they have compiled, wherever they are: paths are relative to the clone.
  set(_launcher ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=true ${CCACHE_PROGRAM})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${_launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${_launcher})
endif()

add_library(lossd_warnings INTERFACE)
set(_cxx_warnings -Wall -Wextra -Werror -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wno-unused-parameter
                  -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  list(APPEND _cxx_warnings -Wthread-safety -Wno-unknown-warning-option)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND LOSSD_SANITIZE MATCHES thread)
  list(APPEND _cxx_warnings -Wno-tsan)  # fences in Abseil's headers
endif()
target_compile_options(lossd_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${_cxx_warnings}>")

# Programs look for libraries in ../lib beside themselves first, for themselves and for what those libraries
# load in turn (RPATH, not RUNPATH): so a packed copy runs from any folder (scripts/bundle).
# Not CMAKE_BUILD_RPATH, which CMake pads with colons: an empty element is the folder that a program is started in.
set(CMAKE_INSTALL_RPATH "\$ORIGIN/../lib")
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
add_link_options(-Wl,--disable-new-dtags)

# Instrumented code makes gcc 12 see overlaps and uninitialised members in the standard library.
if(LOSSD_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  target_compile_options(lossd_warnings INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-maybe-uninitialized>")
endif()

if(LOSSD_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${LOSSD_SANITIZE}>"
                      "$<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>")
  add_link_options(-fsanitize=${LOSSD_SANITIZE})
  # A finding ends the program; without this, one of undefined behaviour is only printed.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>")
endif()

# What fuzzers link reports to them which of its branches ran; only fuzzers link libFuzzer (tests/fuzz).
set(LOSSD_FUZZED_OPTIONS "")
if(LOSSD_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "LOSSD_FUZZ needs clang: cmake --preset fuzz")
  endif()
  set(LOSSD_FUZZED_OPTIONS -fsanitize=fuzzer-no-link)
endif()

# Sets VARIABLE to the architectures, of those that a release is built for, which the GPUs of this machine run.
function(lossd_architectures_here VARIABLE)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE output RESULT_VARIABLE result ERROR_QUIET)
  set(all "")
  if(result EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" all "${output}")
  endif()
  list(TRANSFORM all REPLACE "^8\\..*" "80-real")
  list(TRANSFORM all REPLACE "^9\\..*" "90a-real")
  list(TRANSFORM all REPLACE "^[0-9]+\\..*" "90-virtual")
  list(REMOVE_DUPLICATES all)
  if(NOT all)
    set(all 90a-real)
  endif()
  set(${VARIABLE} ${all} PARENT_SCOPE)
endfunction()

# Hopper's own instructions, Ampere and its siblings, and PTX for what comes after.
set(LOSSD_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual"
    CACHE STRING "GPU architectures to build for; here: those of this machine's GPUs, Hopper's if it has none")
set(LOSSD_HAVE_CUDA OFF)
if(LOSSD_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(LOSSD_HAVE_CUDA ON)
    if(LOSSD_CUDA_ARCHITECTURES STREQUAL "here")
      lossd_architectures_here(CMAKE_CUDA_ARCHITECTURES)
    else()
      set(CMAKE_CUDA_ARCHITECTURES ${LOSSD_CUDA_ARCHITECTURES})
    endif()
    enable_language(CUDA)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know it yet
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    endif()
    find_package(CUDAToolkit REQUIRED)
  endif()
endif()
if(NOT LOSSD_HAVE_CUDA)
  message(STATUS "lossd: CPU-only build (no CUDA compiler, or LOSSD_CUDA=OFF)")
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(spdlog REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(Eigen3 REQUIRED NO_MODULE)
# Of Prometheus's library only the core is wanted; its CMake package asks for what its HTTP server needs.
pkg_check_modules(PROMETHEUS REQUIRED IMPORTED_TARGET prometheus-cpp-core)
pkg_check_modules(MICROHTTPD REQUIRED IMPORTED_TARGET libmicrohttpd>=0.9.75)
pkg_check_modules(GNUTLS REQUIRED IMPORTED_TARGET gnutls)
pkg_check_modules(OPENBLAS REQUIRED IMPORTED_TARGET openblas)
pkg_check_modules(HTTPLIB REQUIRED IMPORTED_TARGET cpp-httplib)
find_package(CLI11 REQUIRED)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
# Sums among processes on CPUs.
find_package(Gloo CONFIG QUIET)
if(NOT TARGET gloo)
  message(STATUS "No Gloo (libgloo-dev): several processes cannot share a head on CPUs")
endif()
