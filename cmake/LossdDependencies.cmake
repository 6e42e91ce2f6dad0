# SPDX-License-Identifier: Apache-2.0
# The packages lossd stands on, all from the distribution (scripts/install-deps lists them).

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
