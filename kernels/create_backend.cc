#include "kernels/create_backend.h"

#include <utility>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/errors/field_error.h"
#include "kernels/gpu_backend.h"

namespace lossd::kernels {
namespace {

absl::StatusOr<CreatedBackend> CreateCpu(const BackendChoice& choice, std::string note) {
  CpuBackendOptions options;
  options.threads = choice.threads;
  if (choice.workspace_bytes > 0) options.workspace_bytes = choice.workspace_bytes;
  options.memory_limit_bytes = choice.memory_limit_bytes;
  options.memory_reserve_bytes = choice.memory_reserve_bytes;
  absl::StatusOr<std::unique_ptr<Backend>> backend = CreateCpuBackend(options);
  if (!backend.ok()) return backend.status();
  return CreatedBackend{*std::move(backend), std::move(note)};
}

}  // namespace

absl::StatusOr<CreatedBackend> CreateBackend(const BackendChoice& choice) {
  if (choice.backend == "cpu") return CreateCpu(choice, "");
  if (choice.backend != "auto" && choice.backend != "cuda") {
    return errors::FieldError("backend", "be auto, cpu or cuda", choice.backend);
  }
  absl::StatusOr<std::unique_ptr<Backend>> gpu = CreateGpuBackend(choice);
  if (gpu.ok()) return CreatedBackend{*std::move(gpu), ""};
  if (choice.backend == "cuda" || !absl::IsUnavailable(gpu.status())) return gpu.status();
  return CreateCpu(choice, std::string(gpu.status().message()));
}

}  // namespace lossd::kernels
