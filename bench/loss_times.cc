// SPDX-License-Identifier: Apache-2.0
// The measurements of `cuda_bench loss` (loss_times.h), except the microbatch and the bare products, which
// are in the header.
#include "bench/loss_times.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "bench/gpu_timer.h"
#include "kernels/cuda/cuda_backend.h"
#include "kernels/cuda/kernels/norm.h"
#include "kernels/head_config.h"

namespace lossd::bench {

// ---- The backend ----

absl::StatusOr<std::unique_ptr<kernels::Backend>> CreateGpus(int devices,
                                                             const kernels::CudaBackendOptions& options) {
  if (devices == 1) return kernels::CreateCudaBackend(options);
  std::vector<std::unique_ptr<kernels::Backend>> members;
  for (int i = 0; i < devices; ++i) {
    kernels::CudaBackendOptions own = options;
    own.device = i;
    own.replica = {i, devices};
    auto member = kernels::CreateCudaBackend(own);
    if (!member.ok()) return member.status();
    members.push_back(*std::move(member));
  }
  std::vector<int> gpus(static_cast<size_t>(devices));
  std::iota(gpus.begin(), gpus.end(), 0);
  auto connection = kernels::CudaReplicaGroup::Create(std::move(gpus));
  if (!connection.ok()) return connection.status();
  const std::shared_ptr<kernels::CudaReplicaGroup> shared = *std::move(connection);
  if (cudaSetDevice(0) != cudaSuccess) return absl::UnavailableError("cudaSetDevice failed");
  using Heads = absl::Span<kernels::HeadKernels* const>;
  return kernels::CreateGroupBackend(std::move(members),
                                     [shared](Heads heads) { return shared->Connect(heads); },
                                     {.join_classes = [shared](Heads heads) { return shared->Join(heads); },
                                      .exchanges = shared->exchanges()});
}

ExchangeWatch::ExchangeWatch(const kernels::Backend& backend) : backend_(backend), begin_(Read()) {}

std::vector<kernels::ExchangeTimes> ExchangeWatch::Read() const {
  std::vector<kernels::ExchangeTimes> times;
  for (const kernels::MemberState& member : backend_.MemberStates()) times.push_back(member.exchanges);
  return times;
}

nlohmann::json ExchangeWatch::PerOne(int count) const {
  const std::vector<kernels::ExchangeTimes> end = Read();
  nlohmann::json found;
  for (size_t kind = 0; kind < kernels::kExchangeKinds && !end.empty(); ++kind) {
    std::vector<double> of_gpus;
    for (size_t i = 0; i < end.size(); ++i) {
      of_gpus.push_back(absl::ToDoubleMilliseconds(end[i][kind] - begin_[i][kind]) / count);
    }
    const auto [least, most] = std::minmax_element(of_gpus.begin(), of_gpus.end());
    const auto operation = std::string(kernels::Name(static_cast<kernels::ExchangeKind>(kind)));
    if (*most > 0.0) found[operation] = {{"least", *least}, {"most", *most}};
  }
  return found;
}

// ---- Deferred microbatches ----

Json TimeDeferred(kernels::Backend& backend, kernels::HeadKernels& head, const DataShape& shape,
                  const LossData& data, kernels::DType dtype, const kernels::LossOptions& options,
                  int iterations, bool errors) {
  const int64_t bytes = shape.rows * shape.hidden * static_cast<int64_t>(kernels::SizeOf(dtype));
  const Deferral deferral = {MakeRowGradients(shape, std::random_device{}()),
                             Take(backend.AllocateRetained(bytes), "AllocateRetained")};
  Microbatch retain(backend, head, shape, data, dtype, options, Call::kRetain, &deferral);
  Microbatch backward(backend, head, shape, data, dtype, options, Call::kBackward, &deferral);
  const int in_flight = backend.max_chunks_in_flight();
  retain.WarmUp(in_flight);
  Json result;
  result["retain"] = ToJson(Summarise(retain.Run(iterations + 1, in_flight)));
  Check(head.ZeroGradients(), "ZeroGradients");
  backward.Run(1, 1);
  result["choices"] = ToJson(backward.choices());
  if (errors) result["errors"] = MeasureErrors(head, backward, shape, data, &deferral.gradients, 0);
  backward.WarmUp(in_flight);
  result["backward"] = ToJson(Summarise(backward.Run(iterations + 1, in_flight)));
  return result;
}

std::string DeferredText(const Json& deferred) {
  const auto ms = [&](const char* call, const char* which) { return deferred[call][which].get<double>(); };
  return absl::StrFormat("  deferred: retain %6.2f  backward %6.2f [%.2f %.2f] x%.3f of loss+grad",
                         ms("retain", "median_ms"), ms("backward", "median_ms"), ms("backward", "min_ms"),
                         ms("backward", "max_ms"), deferred["backward_ratio"].get<double>());
}

// ---- Errors ----

namespace {

// How many rows and classes are compared with the reference.
constexpr int kSampledRows = 32;
constexpr int kSampledClasses = 1024;

// Sums over pairs of a computed value and its reference. Relative() is ||got - want|| / ||want||;
// Projection() is got . want / ||want||^2, which is 1 for values without bias.
struct ErrorNorm {
  double difference = 0.0, reference = 0.0, product = 0.0;
  void Add(double got, double want) {
    difference += (got - want) * (got - want);
    reference += want * want;
    product += got * want;
  }
  double Relative() const { return std::sqrt(difference / reference); }
  double Projection() const { return product / reference; }
};

float FromBFloat16(const uint8_t* from) {
  const uint32_t bits = (static_cast<uint32_t>(from[0]) << 16) | (static_cast<uint32_t>(from[1]) << 24);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

ReferenceQuery MakeQuery(const DataShape& shape, const LossData& data) {
  std::mt19937_64 rng(std::random_device{}());
  ReferenceQuery query;
  query.scale = 1.0 / static_cast<double>(shape.rows);
  std::uniform_int_distribution<int32_t> any_row(0, static_cast<int32_t>(shape.rows - 1));
  std::uniform_int_distribution<int32_t> any_class(0, static_cast<int32_t>(shape.vocab - 1));
  for (int i = 0; i < kSampledRows; ++i) query.rows.push_back(any_row(rng));
  for (int i = 0; i < kSampledClasses; ++i) {
    // Half of the classes are targets of rows, and half are any classes.
    query.classes.push_back(i % 2 == 0 ? data.targets[static_cast<size_t>(any_row(rng))] : any_class(rng));
  }
  return query;
}

// The computed gradients of a query's rows and classes, summed over microbatches.
struct Gradients {
  std::vector<double> hidden;  // [rows, hidden]
  std::vector<double> weight;  // [classes, hidden]

  void Add(kernels::HeadKernels& head, const Microbatch& batch, const DataShape& shape,
           const ReferenceQuery& query) {
    const auto columns = static_cast<size_t>(shape.hidden);
    hidden.resize(query.rows.size() * columns);
    weight.resize(query.classes.size() * columns);
    for (size_t i = 0; i < query.rows.size(); ++i) {
      const uint8_t* from = batch.gradient() + 2 * static_cast<size_t>(query.rows[i]) * columns;
      for (size_t c = 0; c < columns; ++c) {
        hidden[i * columns + c] += static_cast<double>(FromBFloat16(from + 2 * c));
      }
    }
    std::vector<float> row(columns);
    for (size_t j = 0; j < query.classes.size(); ++j) {
      Check(
          head.ReadTensor({kernels::Param::kWeight, kernels::Role::kGradient}, query.classes[j], 1,
                          kernels::DType::kFloat32, {reinterpret_cast<uint8_t*>(row.data()), row.size() * 4}),
          "ReadTensor");
      for (size_t c = 0; c < columns; ++c) weight[j * columns + c] += static_cast<double>(row[c]);
    }
  }
};

// The errors of the mean of `count` gradients.
Json GradientErrors(const Gradients& sums, int count, const DataShape& shape, const LossData& data,
                    const ReferenceQuery& query, const ReferenceAnswer& want) {
  const std::unordered_set<int32_t> targets(data.targets.begin(), data.targets.end());
  const auto columns = static_cast<size_t>(shape.hidden);
  ErrorNorm dx, dw, never;
  for (size_t i = 0; i < sums.hidden.size(); ++i) dx.Add(sums.hidden[i] / count, want.hidden_gradient[i]);
  for (size_t i = 0; i < sums.weight.size(); ++i) {
    const double got = sums.weight[i] / count;
    dw.Add(got, want.weight_gradient[i]);
    if (targets.count(query.classes[i / columns]) == 0) never.Add(got, want.weight_gradient[i]);
  }
  return {{"hidden_gradient", dx.Relative()},
          {"weight_gradient", dw.Relative()},
          {"never_target_weight_gradient", never.Relative()},
          {"never_target_projection", never.Projection()}};
}

// The errors of the mean over the sample seeds 1, 2, ...
Json MeanErrors(kernels::HeadKernels& head, Microbatch& batch, const DataShape& shape, const LossData& data,
                const ReferenceQuery& query, const ReferenceAnswer& want, int seeds) {
  Gradients sums;
  for (int seed = 1; seed <= seeds; ++seed) {
    Check(head.ZeroGradients(), "ZeroGradients");
    batch.set_sample_seed(static_cast<uint64_t>(seed));
    batch.Run(1, 1);
    sums.Add(head, batch, shape, query);
  }
  Json mean = GradientErrors(sums, seeds, shape, data, query, want);
  mean["seeds"] = seeds;
  return mean;
}

}  // namespace

Json MeasureErrors(kernels::HeadKernels& head, Microbatch& batch, const DataShape& shape,
                   const LossData& data, const RowGradients* row_gradients, int seeds) {
  ReferenceQuery query = MakeQuery(shape, data);
  query.gradients = row_gradients;
  const ReferenceAnswer want = ComputeReference(shape, data, query);
  Gradients gradients;
  gradients.Add(head, batch, shape, query);
  Json errors = GradientErrors(gradients, 1, shape, data, query, want);
  ErrorNorm lse, loss;
  double mean_loss = 0.0, largest = 0.0;
  for (size_t i = 0; i < query.rows.size(); ++i) {
    const auto row = static_cast<size_t>(query.rows[i]);
    const auto got_lse = static_cast<double>(batch.lse()[row]);
    lse.Add(got_lse, want.lse[i]);
    largest = std::max(largest, std::fabs(got_lse - want.lse[i]));
    loss.Add(static_cast<double>(batch.loss()[row]), want.loss[i]);
    mean_loss += want.loss[i] / static_cast<double>(want.loss.size());
  }
  errors["lse"] = lse.Relative();
  errors["largest_lse_difference"] = largest;
  errors["loss"] = loss.Relative();
  errors["mean_loss"] = mean_loss;
  if (seeds > 0) errors["mean_over_seeds"] = MeanErrors(head, batch, shape, data, query, want, seeds);
  return errors;
}

// ---- Bare products ----

namespace {

BareProducts MakeBare(const DataShape& shape, const LossData& data, int64_t rows, const BareOptions& options,
                      Timer& timer) {
  return BareProducts(shape, data, rows, options.iterations, options.autotune, timer);
}

Times Scaled(const Times& times, double factor) {
  return {times.median * factor, times.min * factor, times.max * factor};
}

}  // namespace

Floor MeasureFloor(const DataShape& shape, const LossData& data, const BareOptions& options, Timer& timer) {
  constexpr int64_t kMostLogits = int64_t{6} << 30;  // elements
  const int64_t rows = std::min(shape.rows, kMostLogits / shape.vocab);
  const double factor = static_cast<double>(shape.rows) / static_cast<double>(rows);
  Floor floor;
  BareProducts bare = MakeBare(shape, data, rows, options, timer);
  floor.logits = Scaled(bare.Logits(), factor);
  bare.RowLoss(true);  // computes ds, so that the other two products multiply real gradients
  floor.hidden_gradient = Scaled(bare.HiddenGradient(), factor);
  floor.weight_gradient = Scaled(bare.WeightGradient(kernels::DType::kBFloat16, 0.0f), factor);
  floor.rows = rows;
  return floor;
}

nlohmann::json MeasureParts(const DataShape& shape, const LossData& data, int64_t rows,
                            const BareOptions& options, Timer& timer) {
  BareProducts bare = MakeBare(shape, data, rows, options, timer);
  nlohmann::json parts;
  // Order matters: RowLoss(true) leaves real gradients in place of the logits, and the products after it read
  // them.
  parts["logits"] = ToJson(bare.Logits());
  parts["row_loss_forward"] = ToJson(bare.RowLoss(false));
  parts["row_loss"] = ToJson(bare.RowLoss(true));
  parts["hidden_gradient"] = ToJson(bare.HiddenGradient());
  parts["weight_gradient_first"] = ToJson(bare.WeightGradient(kernels::DType::kFloat32, 0.0f));
  parts["weight_gradient_add"] = ToJson(bare.WeightGradient(kernels::DType::kFloat32, 1.0f));
  const double bytes =
      6.0 * static_cast<double>(rows) * static_cast<double>(shape.vocab);  // reads fp32, writes 16 bits
  parts["row_loss_gbps"] = bytes / parts["row_loss"]["median_ms"].get<double>() / 1e6;
  return parts;
}

// ---- Norms ----

namespace {

namespace cuda = ::lossd::kernels::cuda;
using kernels::DType;

// The launches that are timed together, because one launch takes little longer than an event.
constexpr int kLaunches = 16;
constexpr size_t kDistinct = 1000003;  // random elements; the data repeat them

struct NormBuffers {
  void *x, *y, *dx;
};

}  // namespace

NormTimes TimeNorm(int64_t cols, bool centred, Timer& timer) {
  const int64_t elements = kNormRows * cols;
  // There are enough sets of buffers that a set has left L2 when it is used again.
  const int sets = static_cast<int>(std::clamp<int64_t>((int64_t{512} << 20) / (elements * 6), 2, 16));
  std::vector<NormBuffers> buffers;
  std::vector<uint16_t> noise(static_cast<size_t>(elements));
  std::mt19937 rng(std::random_device{}());
  for (size_t i = 0; i < noise.size(); ++i) {
    noise[i] = i < kDistinct
                   ? static_cast<uint16_t>(0x3000u + (rng() & 0x8bffu))  // fp16 with a magnitude of 1/8 to 1
                   : noise[i - kDistinct];
  }
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
  // In this order: gain, shift, their gradients [cols] each, then mean and inverse deviation [kNormRows]
  // each. Gain and shift are bits of the noise; their values do not matter.
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
  const Times forward = timer.MeasureEach(20, kLaunches, [&](int i) {
    Check(cuda::LaunchNormForward(norm(buffers[static_cast<size_t>(i % sets)]), limits, timer.stream()),
          "LaunchNormForward");
  });
  const Times backward = timer.MeasureEach(20, kLaunches, [&](int i) {
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
  // One pass over the elements, in 10^6 bytes; divided by ms this gives GB/s. Forward makes two passes over
  // memory and backward three.
  const double pass = static_cast<double>(elements) * 2.0 / 1e6;
  return {forward, backward, 2.0 * pass / forward.median, 3.0 * pass / backward.median};
}

// ---- Steps ----

nlohmann::json TimeSteps(const kernels::Backend& backend, kernels::HeadKernels& head, int count,
                         const std::function<void()>& accumulate) {
  constexpr int kUntimed = 2;
  const kernels::OptimizerOptions options = {.learning_rate = 1e-6};  // small, so that the rows hardly change
  nlohmann::json exchanges;
  std::vector<double> times;
  for (int step = 1; step <= kUntimed + count; ++step) {
    accumulate();
    const ExchangeWatch watch(backend);
    const Clock::time_point begin = Clock::now();
    Check(head.GradNorm().status(), "GradNorm");
    Check(head.ApplyStep(options, step), "ApplyStep");
    if (step > kUntimed) times.push_back(SecondsSince(begin) * 1e3);
    exchanges = watch.PerOne(1);
  }
  return {{"norm_and_update", ToJson(Summarise(std::move(times)))}, {"exchanges", std::move(exchanges)}};
}

}  // namespace lossd::bench
