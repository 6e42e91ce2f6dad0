// Times the CUDA backend's loss with gradients on one GPU, each algorithm beside the bare GEMM floor of the
// same run.
//
//   cuda_loss_bench --out=results.json --commit=abc123 [--shapes=gemma2-2b,...] [--data=peaked,flat]
//                   [--algorithms=exact,filtered,auto,cut]
//
// "loss+grad" is the time from one finished microbatch to the next with microbatches submitted one after
// the other (host copies both ways included, overlapped by the backend); the floor is the three bare
// cuBLASLt products with 16-bit output. Errors are ||a - ref|| / ||ref|| over sampled rows and classes
// against double precision.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "bench/gpu_data.h"
#include "bench/gpu_timer.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/norm.h"
#include "kernels/cuda/row_loss.h"
#include "nlohmann/json.hpp"

ABSL_FLAG(std::string, out, "", "JSON file to write; empty: none");
ABSL_FLAG(std::string, commit, "", "commit of the program, recorded in the results");
ABSL_FLAG(std::vector<std::string>, shapes,
          std::vector<std::string>({"gemma2-2b", "llama3-8b", "phi3.5-mini", "mistral-nemo", "n4096"}),
          "names of shapes to run, or NxDxV");
ABSL_FLAG(std::vector<std::string>, data, std::vector<std::string>({"peaked"}), "peaked, flat");
ABSL_FLAG(std::vector<std::string>, algorithms, std::vector<std::string>({"exact"}),
          "exact, filtered, auto, cut, cut-filtered (cut with the epsilon of filtered)");
ABSL_FLAG(int64_t, workspace_mib, 2220,
          "workspace of the head, MiB; with the scratch memory of the GEMMs 2.2 GiB");
ABSL_FLAG(int, iterations, 10, "timed microbatches");
ABSL_FLAG(bool, autotune, false, "choose GEMM algorithms by timing, for the backend and the floor");
ABSL_FLAG(bool, loss, true, "run the loss benchmark");
ABSL_FLAG(bool, norm, true, "run the norm benchmark");
ABSL_FLAG(bool, errors, true, "compare with double precision");
ABSL_FLAG(std::string, compute, "bf16", "bf16 or fp32: what the head computes in (fp32: no floor, no parts)");
ABSL_FLAG(bool, fused, true, "compute the loss in the epilogue of the first product where that is faster");
ABSL_FLAG(bool, parts, true, "time the parts of a chunk one by one");

namespace lossd::bench {
namespace {

namespace cuda = ::lossd::kernels::cuda;
using Json = nlohmann::json;
using kernels::DType;

constexpr int kSampledRows = 32;
constexpr int kSampledClasses = 64;
constexpr int64_t kNormRows = 4096;
constexpr int kNormLaunches = 16;  // timed together: one takes little longer than an event

template <typename T>
T Take(absl::StatusOr<T> value, const char* call) {
  Check(value.status(), call);
  return *std::move(value);
}

DType ComputeType() { return absl::GetFlag(FLAGS_compute) == "fp32" ? DType::kFloat32 : DType::kBFloat16; }

Json ToJson(const Times& t) { return {{"median_ms", t.median}, {"min_ms", t.min}, {"max_ms", t.max}}; }

Json ToJson(const std::vector<kernels::Choice>& choices) {
  Json list = Json::array();
  for (const kernels::Choice& choice : choices) {
    list.push_back({{"what", choice.what},
                    {"choice", choice.choice},
                    {"reason", choice.reason},
                    {"workspace_bytes", choice.workspace_bytes}});
  }
  return list;
}

// ---- bare products and parts of a chunk ----

struct Floor {
  Times logits, hidden_gradient, weight_gradient;
  double total() const { return logits.median + hidden_gradient.median + weight_gradient.median; }
};

cuda::GemmShape LogitsGemm(const DataShape& s, int64_t rows) {
  return {.transpose_a = true,
          .m = s.vocab,
          .n = rows,
          .k = s.hidden,
          .lda = s.hidden,
          .ldb = s.hidden,
          .ldc = s.vocab};
}
cuda::GemmShape HiddenGemm(const DataShape& s, int64_t rows) {
  return {.m = s.hidden, .n = rows, .k = s.vocab, .lda = s.hidden, .ldb = s.vocab, .ldc = s.hidden};
}
cuda::GemmShape WeightGemm(const DataShape& s, int64_t rows, DType output) {
  return {.transpose_b = true,
          .m = s.hidden,
          .n = s.vocab,
          .k = rows,
          .lda = s.hidden,
          .ldb = s.vocab,
          .ldc = s.hidden,
          .input = DType::kBFloat16,
          .output = output};
}

// Buffers for the products of `rows` rows at once.
class Bare {
 public:
  Bare(const DataShape& shape, const LossData& data, int64_t rows, Timer& timer)
      : shape_(shape), data_(data), rows_(rows), timer_(timer), gemms_(Take(cuda::Gemms::Create(), "Gemms")) {
    scratch_ = DeviceAlloc<uint8_t>(cuda::kGemmWorkspaceBytes);
    logits_ = DeviceAlloc<uint16_t>(rows * shape.vocab);
    dx_ = DeviceAlloc<uint16_t>(rows * shape.hidden);
    dw_ = DeviceAlloc<float>(shape.vocab * shape.hidden);
    targets_ = DeviceAlloc<int32_t>(rows);
    Check(cudaMemcpy(targets_, data.targets.data(), static_cast<size_t>(rows) * 4, cudaMemcpyDefault),
          "cudaMemcpy");
    floats_ = DeviceAlloc<float>(10 * rows);
    const std::vector<float> ones(static_cast<size_t>(2 * rows), 1.0f);
    Check(cudaMemset(floats_, 0, static_cast<size_t>(40 * rows)), "cudaMemset");
    Check(cudaMemcpy(floats_, ones.data(), ones.size() * 4, cudaMemcpyDefault), "cudaMemcpy");
    int device = 0;
    cudaDeviceProp properties = {};
    Check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    limits_ = {properties.multiProcessorCount, static_cast<int>(properties.sharedMemPerBlockOptin) - 2048,
               static_cast<int>(properties.sharedMemPerMultiprocessor), properties.major >= 9};
  }
  ~Bare() {
    for (void* p : {static_cast<void*>(scratch_), static_cast<void*>(logits_), static_cast<void*>(dx_),
                    static_cast<void*>(dw_), static_cast<void*>(targets_), static_cast<void*>(floats_)}) {
      cudaFree(p);
    }
  }

  Times Product(const cuda::GemmShape& shape, const cuda::GemmOperands& operands) {
    if (absl::GetFlag(FLAGS_autotune))
      Check(gemms_->Tune(shape, operands, scratch_, timer_.stream()), "Tune");
    return timer_.Measure(absl::GetFlag(FLAGS_iterations), [&](int) {
      Check(gemms_->Run(shape, operands, scratch_, timer_.stream()), "Run");
    });
  }

  Times Logits() {
    return Product(LogitsGemm(shape_, rows_), {.a = data_.weight, .b = data_.hidden, .c = logits_});
  }
  Times HiddenGradient() {
    return Product(HiddenGemm(shape_, rows_), {.a = data_.weight, .b = logits_, .c = dx_});
  }
  Times WeightGradient(DType output, float beta) {
    return Product(WeightGemm(shape_, rows_, output),
                   {.a = data_.hidden, .b = logits_, .c = dw_, .beta = beta});
  }
  // Logits are made anew before each run, because the kernel works in place.
  Times RowLoss(bool gradient) {
    const cuda::RowLossParams p = RowParams(gradient);
    std::vector<double> times;
    for (int i = 0; i < kWarmUps + absl::GetFlag(FLAGS_iterations); ++i) {
      Check(gemms_->Run(LogitsGemm(shape_, rows_), {.a = data_.weight, .b = data_.hidden, .c = logits_},
                        scratch_, timer_.stream()),
            "Run");
      times.push_back(timer_.MeasureOnce(
          [&] { Check(cuda::LaunchRowLoss(p, limits_, timer_.stream()), "LaunchRowLoss"); }));
    }
    return Summarise({times.begin() + kWarmUps, times.end()});
  }

 private:
  cuda::RowLossParams RowParams(bool gradient) const {
    cuda::RowLossParams p;
    p.logits = logits_;
    p.ld = p.vocab = shape_.vocab;
    p.rows = p.padded_rows = rows_;
    p.write_gradient = gradient;
    p.class_weight_sum = static_cast<float>(shape_.vocab);
    p.targets = targets_;
    p.weights = floats_;
    p.coef_loss = floats_ + rows_;
    p.coef_lse = floats_ + 2 * rows_;
    p.coef_entropy = floats_ + 3 * rows_;
    p.loss = floats_ + 4 * rows_;
    p.z_loss_part = floats_ + 5 * rows_;
    p.lse = floats_ + 6 * rows_;
    p.entropy = floats_ + 7 * rows_;
    p.target_logprob = floats_ + 8 * rows_;
    p.argmax = reinterpret_cast<int32_t*>(floats_ + 9 * rows_);
    return p;
  }

  const DataShape shape_;
  const LossData& data_;
  const int64_t rows_;
  Timer& timer_;
  std::unique_ptr<cuda::Gemms> gemms_;
  cuda::DeviceLimits limits_;
  uint8_t* scratch_ = nullptr;
  uint16_t* logits_ = nullptr;
  uint16_t* dx_ = nullptr;
  float* dw_ = nullptr;
  int32_t* targets_ = nullptr;
  float* floats_ = nullptr;
};

// ---- the backend ----

// One microbatch in pinned memory, submitted in equal chunks.
class Microbatch {
 public:
  Microbatch(kernels::Backend& backend, kernels::HeadKernels& head, const DataShape& shape,
             const LossData& data, const kernels::LossOptions& options, bool gradients)
      : head_(head),
        shape_(shape),
        data_(data),
        options_(options),
        gradients_(gradients),
        lse_(shape.rows),
        loss_(shape.rows) {
    const int64_t elements = shape.rows * shape.hidden;
    hidden_ = Take(backend.AllocateStaging(elements * element_), "AllocateStaging");
    gradient_ = Take(backend.AllocateStaging(elements * element_), "AllocateStaging");
    uint8_t* hidden = hidden_->bytes().data();
    Check(cudaMemcpy(hidden, data.hidden, static_cast<size_t>(elements * 2), cudaMemcpyDefault),
          "cudaMemcpy");
    for (int64_t i = elements - 1; element_ == 4 && i >= 0; --i) {  // widen in place, from the end
      const uint16_t low = 0;
      const uint16_t high = reinterpret_cast<const uint16_t*>(hidden)[i];
      std::memcpy(hidden + 4 * i, &low, 2);
      std::memcpy(hidden + 4 * i + 2, &high, 2);
    }
    const int64_t chunks = (shape.rows + head.chunk_rows() - 1) / head.chunk_rows();
    chunk_rows_ = (shape.rows + chunks - 1) / chunks;
  }

  int64_t chunk_rows() const { return chunk_rows_; }
  const std::vector<float>& lse() const { return lse_; }
  const std::vector<float>& loss() const { return loss_; }
  const uint8_t* gradient() const { return gradient_->bytes().data(); }
  // Of the last microbatch, per row.
  double dropped_mass() const { return dropped_mass_ / static_cast<double>(shape_.rows); }

  void WarmUp(int in_flight) {
    const Clock::time_point begin = Clock::now();
    while (SecondsSince(begin) < kWarmUpSeconds) Run(kWarmUps, in_flight);
  }

  // Runs `count` microbatches back to back; the times between their ends, the first left out.
  std::vector<double> Run(int count, int in_flight) {
    std::vector<Clock::time_point> ends;
    for (int i = 0; i < count; ++i) {
      for (int64_t begin = 0; begin < shape_.rows; begin += chunk_rows_) {
        {
          absl::MutexLock lock(&mutex_);
          const auto has_room = [this, in_flight] { return unfinished_ < in_flight; };
          mutex_.Await(absl::Condition(&has_room));
          ++unfinished_;
        }
        Submit(begin, begin + chunk_rows_ >= shape_.rows ? &ends : nullptr);
      }
    }
    absl::MutexLock lock(&mutex_);
    const auto idle = [this] { return unfinished_ == 0; };
    mutex_.Await(absl::Condition(&idle));
    std::vector<double> times;
    for (size_t i = 1; i < ends.size(); ++i) {
      times.push_back(std::chrono::duration<double, std::milli>(ends[i] - ends[i - 1]).count());
    }
    return times;
  }

 private:
  struct Work {
    kernels::Slice slice;
    kernels::Chunk chunk;
  };

  void Submit(int64_t begin, std::vector<Clock::time_point>* ends) {
    auto work = std::make_shared<Work>();
    kernels::Slice& slice = work->slice;
    slice.rows = std::min(chunk_rows_, shape_.rows - begin);
    slice.hidden = hidden_->bytes().data() + begin * shape_.hidden * element_;
    slice.targets = data_.targets.data() + begin;
    slice.grad_scale = 1.0f / static_cast<float>(shape_.rows);
    if (gradients_) slice.grad_hidden = gradient_->bytes().data() + begin * shape_.hidden * element_;
    slice.out.lse = lse_.data() + begin;
    slice.out.loss = loss_.data() + begin;
    work->chunk.options = options_;
    work->chunk.hidden_dtype = ComputeType();
    work->chunk.accumulate_gradients = gradients_;
    work->chunk.slices = absl::MakeSpan(&slice, 1);
    kernels::ChunkCallbacks callbacks;
    callbacks.on_results = [](absl::Status status) { Check(status, "on_results"); };
    callbacks.on_done = [this, work, ends, begin](absl::Status status) {
      Check(status, "on_done");
      absl::MutexLock lock(&mutex_);
      dropped_mass_ = (begin == 0 ? 0.0 : dropped_mass_) + work->slice.sums.dropped_mass;
      if (ends != nullptr) ends->push_back(Clock::now());
      --unfinished_;
    };
    head_.Submit(&work->chunk, std::move(callbacks));
  }

  kernels::HeadKernels& head_;
  const DataShape shape_;
  const LossData& data_;
  const kernels::LossOptions options_;
  const bool gradients_;
  const int64_t element_ = static_cast<int64_t>(kernels::SizeOf(ComputeType()));
  std::vector<float> lse_, loss_;
  std::unique_ptr<kernels::StagingMemory> hidden_, gradient_;
  int64_t chunk_rows_ = 0;
  absl::Mutex mutex_;
  int unfinished_ ABSL_GUARDED_BY(mutex_) = 0;
  double dropped_mass_ = 0.0;  // written by the backend's thread, read when no chunk is under way
};

void WriteWeight(kernels::HeadKernels& head, const DataShape& shape, const LossData& data) {
  constexpr int64_t kRows = 8192;
  std::vector<uint8_t> bytes;
  for (int64_t row = 0; row < shape.vocab; row += kRows) {
    const int64_t rows = std::min(kRows, shape.vocab - row);
    bytes.resize(static_cast<size_t>(rows * shape.hidden * 2));
    Check(cudaMemcpy(bytes.data(), static_cast<const uint8_t*>(data.weight) + row * shape.hidden * 2,
                     bytes.size(), cudaMemcpyDefault),
          "cudaMemcpy");
    Check(head.WriteTensor({}, row, rows, DType::kBFloat16, bytes), "WriteTensor");
  }
}

struct ErrorNorm {
  double difference = 0.0, reference = 0.0;
  void Add(double got, double want) {
    difference += (got - want) * (got - want);
    reference += want * want;
  }
  double Relative() const { return std::sqrt(difference / reference); }
};

float FromBFloat16(const uint8_t* from) {
  const uint32_t bits = (static_cast<uint32_t>(from[0]) << 16) | (static_cast<uint32_t>(from[1]) << 24);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Errors of one freshly computed microbatch; the gradients of the head must have been zero before it.
Json Errors(kernels::HeadKernels& head, const Microbatch& batch, const DataShape& shape,
            const LossData& data) {
  std::mt19937_64 rng(std::random_device{}());
  ReferenceQuery query;
  query.scale = 1.0 / static_cast<double>(shape.rows);
  std::uniform_int_distribution<int32_t> any_row(0, static_cast<int32_t>(shape.rows - 1));
  std::uniform_int_distribution<int32_t> any_class(0, static_cast<int32_t>(shape.vocab - 1));
  for (int i = 0; i < kSampledRows; ++i) query.rows.push_back(any_row(rng));
  for (int i = 0; i < kSampledClasses; ++i) {
    query.classes.push_back(i % 2 == 0 ? data.targets[static_cast<size_t>(any_row(rng))] : any_class(rng));
  }
  const ReferenceAnswer want = ComputeReference(shape, data, query);
  ErrorNorm lse, loss, dx, dw;
  for (size_t i = 0; i < query.rows.size(); ++i) {
    const auto row = static_cast<size_t>(query.rows[i]);
    lse.Add(static_cast<double>(batch.lse()[row]), want.lse[i]);
    loss.Add(static_cast<double>(batch.loss()[row]), want.loss[i]);
    for (int64_t c = 0; c < shape.hidden; ++c) {
      const size_t at = row * static_cast<size_t>(shape.hidden) + static_cast<size_t>(c);
      dx.Add(static_cast<double>(FromBFloat16(batch.gradient() + 2 * at)),
             want.hidden_gradient[i * static_cast<size_t>(shape.hidden) + static_cast<size_t>(c)]);
    }
  }
  std::vector<float> row(static_cast<size_t>(shape.hidden));
  for (size_t j = 0; j < query.classes.size(); ++j) {
    Check(head.ReadTensor({kernels::Param::kWeight, kernels::Role::kGradient}, query.classes[j], 1,
                          DType::kFloat32, {reinterpret_cast<uint8_t*>(row.data()), row.size() * 4}),
          "ReadTensor");
    for (size_t c = 0; c < row.size(); ++c) {
      dw.Add(static_cast<double>(row[c]), want.weight_gradient[j * row.size() + c]);
    }
  }
  double mean_loss = 0.0;
  for (double l : want.loss) mean_loss += l / static_cast<double>(want.loss.size());
  return {{"lse", lse.Relative()},
          {"loss", loss.Relative()},
          {"hidden_gradient", dx.Relative()},
          {"weight_gradient", dw.Relative()},
          {"mean_loss", mean_loss}};
}

int64_t FreeBytes() {
  size_t free_bytes = 0, total = 0;
  Check(cudaMemGetInfo(&free_bytes, &total), "cudaMemGetInfo");
  return static_cast<int64_t>(free_bytes);
}

kernels::LossOptions FindOptions(const std::string& name) {
  using kernels::Algorithm;
  for (const auto algorithm : {Algorithm::kExact, Algorithm::kFiltered, Algorithm::kAuto, Algorithm::kCut}) {
    if (kernels::Name(algorithm) != name) continue;
    return {.algorithm = algorithm, .filter_epsilon = kernels::DefaultFilterEpsilon(algorithm)};
  }
  if (name == "cut-filtered") return {.algorithm = Algorithm::kCut};
  std::cerr << "--algorithms: unknown algorithm " << name << std::endl;
  std::exit(2);
}

Json RunBackend(const DataShape& shape, const LossData& data, const std::string& algorithm) {
  const kernels::LossOptions options = FindOptions(algorithm);
  auto backend = Take(
      kernels::CreateCudaBackend({.workspace_bytes = absl::GetFlag(FLAGS_workspace_mib) << 20,
                                  .autotune = absl::GetFlag(FLAGS_autotune),
                                  .deterministic = !absl::GetFlag(FLAGS_autotune),
                                  .fused_loss = absl::GetFlag(FLAGS_fused) ? kernels::FusedLoss::kWhereFaster
                                                                           : kernels::FusedLoss::kNever}),
      "CreateCudaBackend");
  const kernels::HeadConfig config = {.hidden_size = shape.hidden,
                                      .vocab_size = shape.vocab,
                                      .compute_dtype = ComputeType(),
                                      .optimizer_state = kernels::OptimizerState::kNone,
                                      .algorithm = options.algorithm};
  const int64_t free_before = FreeBytes();
  auto head = Take(backend->CreateHead(config), "CreateHead");
  const int64_t taken = free_before - FreeBytes();
  const int64_t planned = head->memory().Total() - head->memory()[kernels::MemoryKind::kStaging];
  WriteWeight(*head, shape, data);
  Microbatch full(*backend, *head, shape, data, options, true);
  full.Run(1, 1);
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  const kernels::MemoryBytes memory = head->memory(), all = backend->memory().current;
  Json result = {
      {"chunk_rows", full.chunk_rows()},
      {"workspace_mib", mib(all[kernels::MemoryKind::kWorkspace] + all[kernels::MemoryKind::kSlots])},
      {"head_workspace_mib", mib(memory[kernels::MemoryKind::kWorkspace])},
      {"slots_mib", mib(memory[kernels::MemoryKind::kSlots])},
      {"gradients_mib", mib(memory[kernels::MemoryKind::kGradients])},
      {"memory_planned_bytes", planned},
      {"memory_taken_bytes", taken},
      {"memory_taken_after_a_microbatch_bytes", free_before - FreeBytes()},
      {"choices", ToJson(head->Describe())}};
  if (absl::GetFlag(FLAGS_errors) && ComputeType() == DType::kBFloat16)
    result["errors"] = Errors(*head, full, shape, data);
  result["dropped_mass"] = full.dropped_mass();
  const int iterations = absl::GetFlag(FLAGS_iterations);
  full.WarmUp(backend->max_chunks_in_flight());
  result["loss_and_gradients"] = ToJson(Summarise(full.Run(iterations + 1, backend->max_chunks_in_flight())));
  result["loss_and_gradients_one_at_a_time"] = ToJson(Summarise(full.Run(iterations + 1, 1)));
  Microbatch forward(*backend, *head, shape, data, options, false);
  forward.WarmUp(backend->max_chunks_in_flight());
  result["loss_only"] = ToJson(Summarise(forward.Run(iterations + 1, backend->max_chunks_in_flight())));
  return result;
}

Floor MeasureFloor(const DataShape& shape, const LossData& data, Timer& timer) {
  Floor floor;
  Bare bare(shape, data, shape.rows, timer);
  floor.logits = bare.Logits();
  bare.RowLoss(true);  // the other two multiply real gradients
  floor.hidden_gradient = bare.HiddenGradient();
  floor.weight_gradient = bare.WeightGradient(DType::kBFloat16, 0.0f);
  return floor;
}

Json MeasureParts(const DataShape& shape, const LossData& data, int64_t rows, Timer& timer) {
  Bare bare(shape, data, rows, timer);
  Json parts;
  parts["logits"] = ToJson(bare.Logits());
  parts["row_loss_forward"] = ToJson(bare.RowLoss(false));
  parts["row_loss"] = ToJson(bare.RowLoss(true));
  parts["hidden_gradient"] = ToJson(bare.HiddenGradient());
  parts["weight_gradient_first"] = ToJson(bare.WeightGradient(DType::kFloat32, 0.0f));
  parts["weight_gradient_add"] = ToJson(bare.WeightGradient(DType::kFloat32, 1.0f));
  const double bytes = 2.0 * static_cast<double>(rows) * static_cast<double>(shape.vocab) * 2.0;
  parts["row_loss_gbps"] = bytes / parts["row_loss"]["median_ms"].get<double>() / 1e6;
  return parts;
}

// Of the three products, whether they are computed or not; of the first one for the loss alone.
Json Teraflops(const DataShape& shape, const Floor& floor, const Json& result) {
  const double product = 2e-9 * static_cast<double>(shape.rows) * static_cast<double>(shape.hidden) *
                         static_cast<double>(shape.vocab);  // over ms
  return {{"floor", 3.0 * product / floor.total()},
          {"loss_and_gradients", 3.0 * product / result["loss_and_gradients"]["median_ms"].get<double>()},
          {"loss_only", product / result["loss_only"]["median_ms"].get<double>()}};
}

void AddFloor(const Floor& floor, Json& result) {
  result["floor"] = {{"logits", ToJson(floor.logits)},
                     {"hidden_gradient", ToJson(floor.hidden_gradient)},
                     {"weight_gradient", ToJson(floor.weight_gradient)},
                     {"total_ms", floor.total()}};
  result["ratio"] = result["loss_and_gradients"]["median_ms"].get<double>() / floor.total();
  result["forward_ratio"] = result["loss_only"]["median_ms"].get<double>() / floor.logits.median;
}

void Print(const NamedShape& named, const std::string& kind, const std::string& algorithm, const Floor& floor,
           const Json& result) {
  std::cout << absl::StrFormat(
                   "%-13s %-6s %-12s chunk %5d ws %6.0f slots %4.0f MiB  floor %6.2f (%5.2f fwd)  loss+grad "
                   "%6.2f [%.2f "
                   "%.2f] x%.3f  loss %6.2f x%.3f",
                   named.name, kind, algorithm, result["chunk_rows"].get<int64_t>(),
                   result["head_workspace_mib"].get<double>(), result["slots_mib"].get<double>(),
                   floor.total(), floor.logits.median,
                   result["loss_and_gradients"]["median_ms"].get<double>(),
                   result["loss_and_gradients"]["min_ms"].get<double>(),
                   result["loss_and_gradients"]["max_ms"].get<double>(), result["ratio"].get<double>(),
                   result["loss_only"]["median_ms"].get<double>(), result["forward_ratio"].get<double>())
            << std::endl;
  std::cout << result.dump() << std::endl;
}

// One result for each algorithm, all with the same data and floor.
std::vector<Json> RunShape(const NamedShape& named, const std::string& kind, Timer& timer) {
  const DataShape& shape = named.shape;
  LossData data =
      MakeData(kind == "flat" ? DataKind::kFlat : DataKind::kPeaked, shape, std::random_device{}());
  const std::vector<std::string> algorithms = absl::GetFlag(FLAGS_algorithms);
  std::vector<Json> results;
  results.reserve(algorithms.size());
  for (const std::string& algorithm : algorithms) results.push_back(RunBackend(shape, data, algorithm));
  if (ComputeType() == DType::kBFloat16) {
    const Floor floor = MeasureFloor(shape, data, timer);
    for (size_t i = 0; i < results.size(); ++i) {
      AddFloor(floor, results[i]);
      results[i]["teraflops"] = Teraflops(shape, floor, results[i]);
      Print(named, kind, algorithms[i], floor, results[i]);
    }
    if (absl::GetFlag(FLAGS_parts)) {
      results.front()["parts_of_a_chunk"] = MeasureParts(shape, data, results.front()["chunk_rows"], timer);
    }
  }
  Free(data);
  for (size_t i = 0; i < results.size(); ++i) {
    results[i]["algorithm"] = algorithms[i];
    results[i]["shape"] = {
        {"name", named.name}, {"rows", shape.rows}, {"hidden", shape.hidden}, {"vocab", shape.vocab}};
    results[i]["data"] = kind;
    results[i]["compute"] = absl::GetFlag(FLAGS_compute);
  }
  return results;
}

// ---- norm ----

struct NormBuffers {
  void *x, *y, *dx;
};

Json RunNorm(int64_t cols, bool centred, double copy_gbps, Timer& timer) {
  const int64_t elements = kNormRows * cols;
  // Enough sets that none is still in L2 when its turn comes again.
  const int sets = static_cast<int>(std::clamp<int64_t>((int64_t{512} << 20) / (elements * 6), 2, 16));
  std::vector<NormBuffers> buffers;
  std::vector<uint16_t> noise(static_cast<size_t>(elements));
  std::mt19937 rng(std::random_device{}());
  for (uint16_t& v : noise)
    v = static_cast<uint16_t>(0x3000u + (rng() & 0x8bffu));  // fp16, magnitude 1/8 ... 1
  for (int i = 0; i < sets; ++i) {
    buffers.push_back(
        {DeviceAlloc<uint16_t>(elements), DeviceAlloc<uint16_t>(elements), DeviceAlloc<uint16_t>(elements)});
    Check(cudaMemcpy(buffers.back().x, noise.data(), noise.size() * 2, cudaMemcpyDefault), "cudaMemcpy");
  }
  cudaDeviceProp properties = {};
  Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  const cuda::DeviceLimits limits = {
      .multiprocessors = properties.multiProcessorCount,
      .shared_bytes_per_block = static_cast<int>(properties.sharedMemPerBlockOptin) - (2 << 10),
      .shared_bytes_per_sm = static_cast<int>(properties.sharedMemPerMultiprocessor),
      .has_clusters = properties.major >= 9,
      .is_hopper = properties.major == 9 && properties.minor == 0};
  auto* params = DeviceAlloc<float>(4 * cols + 2 * kNormRows);
  Check(cudaMemcpy(params, noise.data(), static_cast<size_t>(cols) * 8, cudaMemcpyDefault), "cudaMemcpy");
  auto* partials = DeviceAlloc<float>(cuda::NormPartialFloats(cols, limits.multiprocessors));
  const auto norm = [&](const NormBuffers& b) {
    cuda::NormParams p;
    p.centred = centred;
    p.gain = params;
    p.shift = params + cols;
    p.rows = kNormRows;
    p.x = {b.x, DType::kFloat16, cols, cols};
    p.y = {b.y, DType::kFloat16, cols, cols};
    p.mean = params + 4 * cols;
    p.inverse_deviation = params + 4 * cols + kNormRows;
    return p;
  };
  const Times forward = timer.MeasureEach(20, kNormLaunches, [&](int i) {
    Check(cuda::LaunchNormForward(norm(buffers[static_cast<size_t>(i % sets)]), limits, timer.stream()),
          "LaunchNormForward");
  });
  const Times backward = timer.MeasureEach(20, kNormLaunches, [&](int i) {
    const NormBuffers& b = buffers[static_cast<size_t>(i % sets)];
    cuda::NormBackwardParams back;
    back.dx = {b.dx, DType::kFloat16, cols, cols};
    back.gain_gradient = params + 2 * cols;
    back.shift_gradient = params + 3 * cols;
    back.partials = partials;
    Check(cuda::LaunchNormBackward(norm(b), back, limits, timer.stream()), "LaunchNormBackward");
  });
  for (const NormBuffers& b : buffers) {
    cudaFree(b.x);
    cudaFree(b.y);
    cudaFree(b.dx);
  }
  cudaFree(params);
  cudaFree(partials);
  const double pass = static_cast<double>(elements) * 2.0 / 1e6;
  const double f = 2.0 * pass / forward.median;
  const double b = 3.0 * pass / backward.median;
  std::cout << absl::StrFormat(
                   "%-9s fp16 %d x %5d  forward %5.0f GB/s (%.2f of copy)  backward %5.0f GB/s (%.2f)",
                   centred ? "layernorm" : "rmsnorm", kNormRows, cols, f, f / copy_gbps, b, b / copy_gbps)
            << std::endl;
  return {{"norm", centred ? "layernorm" : "rmsnorm"},
          {"columns", cols},
          {"rows", kNormRows},
          {"forward", ToJson(forward)},
          {"backward", ToJson(backward)},
          {"forward_gbps", f},
          {"backward_gbps", b},
          {"forward_of_copy", f / copy_gbps},
          {"backward_of_copy", b / copy_gbps}};
}

NamedShape FindShape(const std::string& name) {
  for (const NamedShape& shape : kShapes) {
    if (shape.name == name) return shape;
  }
  const std::vector<std::string> parts = absl::StrSplit(name, 'x');
  if (parts.size() != 3) {
    std::cerr << "--shapes: unknown shape " << name << std::endl;
    std::exit(2);
  }
  return {name, {std::atoll(parts[0].c_str()), std::atoll(parts[1].c_str()), std::atoll(parts[2].c_str())}};
}

std::string Today() {
  const std::time_t now = std::time(nullptr);
  char text[16] = {};
  std::strftime(text, sizeof(text), "%Y-%m-%d", std::gmtime(&now));
  return text;
}

int Main() {
  cudaDeviceProp properties = {};
  Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  Timer timer;
  const double copy_gbps = CopyBandwidth(timer);
  Json results = {{"card", properties.name},
                  {"date", Today()},
                  {"commit", absl::GetFlag(FLAGS_commit)},
                  {"copy_gbps", copy_gbps}};
  std::cout << properties.name << ", copy " << copy_gbps << " GB/s (read + write)" << std::endl;
  if (absl::GetFlag(FLAGS_norm)) {
    for (bool centred : {true, false}) {
      for (int64_t cols : {1024, 2048, 4096, 5120, 8192, 12288, 15872}) {
        results["norm"].push_back(RunNorm(cols, centred, copy_gbps, timer));
      }
    }
  }
  if (absl::GetFlag(FLAGS_loss)) {
    for (const std::string& name : absl::GetFlag(FLAGS_shapes)) {
      for (const std::string& kind : absl::GetFlag(FLAGS_data)) {
        for (Json& result : RunShape(FindShape(name), kind, timer)) {
          results["loss"].push_back(std::move(result));
        }
      }
    }
  }
  if (!absl::GetFlag(FLAGS_out).empty())
    std::ofstream(absl::GetFlag(FLAGS_out)) << results.dump(1) << std::endl;
  return 0;
}

}  // namespace
}  // namespace lossd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return lossd::bench::Main();
}
