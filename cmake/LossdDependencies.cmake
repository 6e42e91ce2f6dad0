# The packages lossd stands on, all from the distribution (scripts/install-deps lists them).

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED COMPONENTS core)
find_package(civetweb CONFIG REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(spdlog REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(Eigen3 REQUIRED NO_MODULE)
pkg_check_modules(OPENBLAS REQUIRED IMPORTED_TARGET openblas)
