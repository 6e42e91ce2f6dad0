// SPDX-License-Identifier: Apache-2.0
// Gemms (gemm.h): the functions of cuBLASLt (Library), the descriptors and the algorithm of a shape (Plan),
// and products in steps (ForEachStep).
#include "kernels/cuda/device/gemm.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device/cuda_status.h"
#include "kernels/cuda/device/device.h"

namespace lossd::kernels::cuda {
namespace {

constexpr int kGemmCandidates = 12;  // algorithms that cuBLASLt proposes for a shape, and Tune times
// A product that sums over the rows is a weight gradient, for which nobody waits. It leaves this many
// multiprocessors to the work of other streams: copies within a GPU are kernels, and so is what autograd does
// with the hidden gradient. cuBLASLt takes it as a hint. docs/lab/2026-11-27-a-head-inside-the-process.md has
// what it brings.
constexpr int kMultiprocessorsBesideWeightGradient = 2;
constexpr int kTimedRuns = 2;  // of each algorithm, after one run that is not timed

cudaDataType_t ToCuda(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
  }
  return CUDA_R_32F;
}

// Where cuBLASLt may be installed, in order: the loader's search path, then the toolkit's usual place.
constexpr const char* kCublasFiles[] = {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"};

}  // namespace

// The functions of cuBLASLt that we call.
struct Gemms::Library {
  SharedLibrary file;
  decltype(&cublasLtCreate) create = nullptr;
  decltype(&cublasLtDestroy) destroy = nullptr;
  decltype(&cublasLtGetStatusString) status_string = nullptr;
  decltype(&cublasLtMatmul) matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic = nullptr;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) config_get = nullptr;

  absl::Status Load() {
    LOSSD_RETURN_IF_ERROR(file.Load(kCublasFiles, "cuBLASLt cannot be loaded"));
    const bool complete = file.Find("cublasLtCreate", create) && file.Find("cublasLtDestroy", destroy) &&
                          file.Find("cublasLtGetStatusString", status_string) &&
                          file.Find("cublasLtMatmul", matmul) &&
                          file.Find("cublasLtMatmulDescCreate", desc_create) &&
                          file.Find("cublasLtMatmulDescDestroy", desc_destroy) &&
                          file.Find("cublasLtMatmulDescSetAttribute", desc_set) &&
                          file.Find("cublasLtMatrixLayoutCreate", layout_create) &&
                          file.Find("cublasLtMatrixLayoutDestroy", layout_destroy) &&
                          file.Find("cublasLtMatmulPreferenceCreate", preference_create) &&
                          file.Find("cublasLtMatmulPreferenceDestroy", preference_destroy) &&
                          file.Find("cublasLtMatmulPreferenceSetAttribute", preference_set) &&
                          file.Find("cublasLtMatmulAlgoGetHeuristic", heuristic) &&
                          file.Find("cublasLtMatmulAlgoConfigGetAttribute", config_get);
    return complete ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cuBLASLt lacks ", dlerror()));
  }

  absl::Status ToStatus(cublasStatus_t status, absl::string_view call) const {
    if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat(call, " failed: ", status_string(status)));
  }
};

// The descriptors of one shape, and the algorithm chosen for it.
struct Gemms::Plan {
  explicit Plan(const Library& lib) : library(lib) {}
  ~Plan() {
    if (desc != nullptr) library.desc_destroy(desc);
    for (cublasLtMatrixLayout_t layout : {a, b, c}) {
      if (layout != nullptr) library.layout_destroy(layout);
    }
  }

  // `multiprocessors`: the most that a weight gradient takes.
  absl::Status Describe(const GemmShape& shape, int32_t multiprocessors) {
    LOSSD_RETURN_IF_ERROR(library.ToStatus(library.desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                                           "cublasLtMatmulDescCreate"));
    const cublasOperation_t op_a = shape.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = shape.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    LOSSD_RETURN_IF_ERROR(
        library.ToStatus(library.desc_set(desc, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)),
                         "cublasLtMatmulDescSetAttribute(TRANSA)"));
    LOSSD_RETURN_IF_ERROR(
        library.ToStatus(library.desc_set(desc, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof(op_b)),
                         "cublasLtMatmulDescSetAttribute(TRANSB)"));
    if (shape.transpose_b) {
      LOSSD_RETURN_IF_ERROR(library.ToStatus(library.desc_set(desc, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
                                                              &multiprocessors, sizeof(multiprocessors)),
                                             "cublasLtMatmulDescSetAttribute(SM_COUNT_TARGET)"));
    }
    LOSSD_RETURN_IF_ERROR(Layout(&a, shape.input, shape.transpose_a, shape.m, shape.k, shape.lda));
    LOSSD_RETURN_IF_ERROR(Layout(&b, shape.input, shape.transpose_b, shape.k, shape.n, shape.ldb));
    return Layout(&c, shape.output, false, shape.m, shape.n, shape.ldc);
  }

  absl::Status Layout(cublasLtMatrixLayout_t* layout, DType dtype, bool transposed, int64_t rows,
                      int64_t cols, int64_t ld) {
    if (transposed) std::swap(rows, cols);
    return library.ToStatus(library.layout_create(layout, ToCuda(dtype), static_cast<uint64_t>(rows),
                                                  static_cast<uint64_t>(cols), ld),
                            "cublasLtMatrixLayoutCreate");
  }

  // Asks cuBLAS for candidates, best first. Reductions across splits are done in fp32 and in a fixed order.
  absl::Status Propose(cublasLtHandle_t handle, bool scratch) {
    cublasLtMatmulPreference_t preference = nullptr;
    LOSSD_RETURN_IF_ERROR(
        library.ToStatus(library.preference_create(&preference), "cublasLtMatmulPreferenceCreate"));
    const size_t workspace = scratch ? static_cast<size_t>(kGemmWorkspaceBytes) : 0;
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    library.preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                           sizeof(workspace));
    library.preference_set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                           sizeof(reductions));
    candidates.resize(kGemmCandidates);
    int found = 0;
    const cublasStatus_t status =
        library.heuristic(handle, desc, a, b, c, c, preference, kGemmCandidates, candidates.data(), &found);
    library.preference_destroy(preference);
    LOSSD_RETURN_IF_ERROR(library.ToStatus(status, "cublasLtMatmulAlgoGetHeuristic"));
    candidates.resize(static_cast<size_t>(found));
    return found > 0 ? absl::OkStatus()
                     : absl::UnavailableError("cublasLtMatmulAlgoGetHeuristic found nothing");
  }

  const Library& library;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr;
  cublasLtMatrixLayout_t b = nullptr;
  cublasLtMatrixLayout_t c = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> candidates;
  size_t chosen = 0;
  bool timed = false;  // whether the choice is the fastest candidate, not the first
};

Gemms::Gemms() : library_(std::make_unique<Library>()) {}

Gemms::~Gemms() {
  plans_.clear();
  if (handle_ != nullptr) library_->destroy(handle_);
}

absl::StatusOr<std::unique_ptr<Gemms>> Gemms::Create() {
  std::unique_ptr<Gemms> gemms(new Gemms);
  LOSSD_RETURN_IF_ERROR(gemms->library_->Load());
  LOSSD_RETURN_IF_ERROR(
      gemms->library_->ToStatus(gemms->library_->create(&gemms->handle_), "cublasLtCreate"));
  int device = 0;
  int multiprocessors = 0;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device), "cudaGetDevice");
  LOSSD_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
                             "cudaDeviceGetAttribute(MultiProcessorCount)");
  gemms->weight_gradient_multiprocessors_ =
      std::max(1, multiprocessors - kMultiprocessorsBesideWeightGradient);
  return gemms;
}

absl::StatusOr<Gemms::Plan*> Gemms::FindOrCreate(const GemmShape& shape) {
  std::unique_ptr<Plan>& slot = plans_[shape];
  if (slot != nullptr) return slot.get();
  auto plan = std::make_unique<Plan>(*library_);
  LOSSD_RETURN_IF_ERROR(plan->Describe(shape, weight_gradient_multiprocessors_));
  LOSSD_RETURN_IF_ERROR(plan->Propose(handle_, shape.scratch));
  slot = std::move(plan);
  return slot.get();
}

GemmShape Gemms::FirstStep(GemmShape shape) const {
  if (takes_steps_) {
    shape.rows() = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(shape.rows())));
  }
  return shape;
}

absl::Status Gemms::ForEachStep(GemmShape shape, absl::FunctionRef<absl::Status(const GemmShape&)> body) {
  do {
    const GemmShape step = FirstStep(shape);
    LOSSD_RETURN_IF_ERROR(body(step));
    shape.rows() -= step.rows();
  } while (shape.rows() > 0);
  return absl::OkStatus();
}

absl::Status Gemms::Prepare(const GemmShape& shape) {
  return ForEachStep(shape, [this](const GemmShape& step) -> absl::Status {
    const absl::Status status = FindOrCreate(step).status();
    return status.ok() ? status : absl::InternalError(status.message());
  });
}

namespace {

const void* ColumnsAfter(const void* matrix, int64_t columns, int64_t ld, DType dtype) {
  return static_cast<const uint8_t*>(matrix) + columns * ld * static_cast<int64_t>(SizeOf(dtype));
}

// Moves the operands to the part of the product that is left after a step. If the product sums over the rows
// (transpose_b), each step adds to the same C: beta is 1 from the second step on. Otherwise each step has its
// own columns of C.
void Advance(GemmOperands& operands, const GemmShape& step) {
  operands.b = ColumnsAfter(operands.b, step.rows(), step.ldb, step.input);
  if (step.transpose_b) {
    operands.a = ColumnsAfter(operands.a, step.rows(), step.lda, step.input);
    operands.beta = 1.0f;
  } else {
    operands.c = const_cast<void*>(ColumnsAfter(operands.c, step.rows(), step.ldc, step.output));
  }
}

}  // namespace

absl::Status Gemms::Run(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                        cudaStream_t stream) {
  GemmOperands left = operands;
  return ForEachStep(shape, [&](const GemmShape& step) -> absl::Status {
    LOSSD_RETURN_IF_ERROR(RunStep(step, left, workspace, stream));
    Advance(left, step);
    return absl::OkStatus();
  });
}

absl::Status Gemms::RunStep(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                            cudaStream_t stream) {
  absl::StatusOr<Plan*> found = FindOrCreate(shape);
  if (!found.ok()) return found.status();
  const Plan& plan = **found;
  const auto workspace_bytes = static_cast<size_t>(shape.scratch ? kGemmWorkspaceBytes : 0);
  const auto multiply = [&](float alpha, float beta) {
    return library_->ToStatus(
        library_->matmul(handle_, plan.desc, &alpha, operands.a, plan.a, operands.b, plan.b, &beta,
                         operands.c, plan.c, operands.c, plan.c, &plan.candidates[plan.chosen].algo,
                         workspace, workspace_bytes, stream),
        "cublasLtMatmul");
  };
  if (loads_code_) {
    // These runs load the code for each kind of factor. They overwrite C; no result is used while this is on.
    for (const float alpha : {0.5f, 1.0f}) {
      for (const float beta : {0.0f, 1.0f}) LOSSD_RETURN_IF_ERROR(multiply(alpha, beta));
    }
  }
  return multiply(operands.alpha, operands.beta);
}

Choice Gemms::Describe(const GemmShape& shape) const {
  const Plan& plan = *plans_.at(FirstStep(shape));
  const cublasLtMatmulHeuristicResult_t& chosen = plan.candidates[plan.chosen];
  const auto attribute = [&](cublasLtMatmulAlgoConfigAttributes_t name) {
    int32_t value = -1;
    size_t written = 0;
    library_->config_get(&chosen.algo, name, &value, sizeof(value), &written);
    return value;
  };
  return {.choice = absl::StrCat("cuBLASLt ", attribute(CUBLASLT_ALGO_CONFIG_ID), ", tile ",
                                 attribute(CUBLASLT_ALGO_CONFIG_TILE_ID), ", stages ",
                                 attribute(CUBLASLT_ALGO_CONFIG_STAGES_ID), ", split ",
                                 attribute(CUBLASLT_ALGO_CONFIG_SPLITK_NUM)),
          .reason =
              absl::StrCat(plan.timed ? "the fastest of " : "its first choice of ", plan.candidates.size())};
}

absl::StatusOr<double> Gemms::Time(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                                   cudaStream_t stream) {
  LOSSD_TRY(const Event begin, Event::Create(/*timing=*/true));
  LOSSD_TRY(const Event end, Event::Create(/*timing=*/true));
  LOSSD_RETURN_IF_ERROR(RunStep(shape, operands, workspace, stream));
  LOSSD_RETURN_IF_ERROR(Record(begin, stream));
  for (int i = 0; i < kTimedRuns; ++i) LOSSD_RETURN_IF_ERROR(RunStep(shape, operands, workspace, stream));
  LOSSD_RETURN_IF_ERROR(Record(end, stream));
  LOSSD_RETURN_IF_ERROR(WaitFor(end));
  float milliseconds = 0.0f;
  LOSSD_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()),
                             "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) / kTimedRuns;
}

absl::Status Gemms::Tune(const GemmShape& shape, const GemmOperands& operands, void* workspace,
                         cudaStream_t stream) {
  const GemmShape step = FirstStep(shape);
  absl::StatusOr<Plan*> found = FindOrCreate(step);
  if (!found.ok()) return found.status();
  Plan& plan = **found;
  if (plan.candidates.size() == 1) return absl::OkStatus();
  double best_time = std::numeric_limits<double>::infinity();
  size_t best = 0;
  for (size_t i = 0; i < plan.candidates.size(); ++i) {
    plan.chosen = i;
    absl::StatusOr<double> time = Time(step, operands, workspace, stream);
    if (!time.ok()) return time.status();
    if (*time < best_time) {
      best_time = *time;
      best = i;
    }
  }
  plan.chosen = best;
  plan.timed = true;
  return absl::OkStatus();
}

}  // namespace lossd::kernels::cuda
