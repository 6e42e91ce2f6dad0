#include "tests/kernels/problem.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <numeric>
#include <utility>

#include "Eigen/Core"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "tests/kernels/tolerances.h"

namespace lossd::kernels::testing {
namespace {

template <typename T>
std::vector<uint8_t> EncodeAs(absl::Span<const float> values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = static_cast<T>(values[i]);
    std::memcpy(&bytes[i * sizeof(T)], &value, sizeof(T));
  }
  return bytes;
}

template <typename T>
std::vector<float> DecodeAs(absl::Span<const uint8_t> bytes) {
  std::vector<float> values(bytes.size() / sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    T value;
    std::memcpy(&value, &bytes[i * sizeof(T)], sizeof(T));
    values[i] = static_cast<float>(value);
  }
  return values;
}

std::vector<float> Normal(Rng& rng, int64_t n, float mean, float deviation, DType dtype) {
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = RoundTo(dtype, normal(rng));
  return values;
}

std::vector<float> UniformVector(Rng& rng, int64_t n, float low, float high) {
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = Uniform(rng, low, high);
  return values;
}

std::vector<double> ToDouble(const std::vector<float>& values) { return {values.begin(), values.end()}; }

template <typename T>
const T* DataOrNull(const std::vector<T>& values) {
  return values.empty() ? nullptr : values.data();
}

double Norm2(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

// See tolerances.h.
void ExpectGradientNear(const char* what, const std::vector<float>& got, const reference::Gradient& want,
                        DType compute, DType output, double max_abs_logit) {
  ASSERT_EQ(got.size(), want.value.size()) << what;
  double error = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = static_cast<double>(got[i]) - want.value[i];
    error += difference * difference;
  }
  error = std::sqrt(error);
  const double norm = Norm2(want.value);
  const double limit = norm * (GradientTolerance(compute, max_abs_logit) + UnitRoundoff(output)) +
                       Norm2(want.magnitude) * MagnitudeTolerance(compute, max_abs_logit) +
                       UnderflowError(output) * std::sqrt(static_cast<double>(got.size()));
  EXPECT_LE(error, limit) << what << ": relative error " << error / norm << ", reference norm " << norm;
}

// Output buffers of a chunk and the Slices that point into them.
struct ChunkBuffers {
  std::vector<std::vector<uint8_t>> hidden;
  std::vector<std::vector<uint8_t>> grad_hidden;
  std::vector<Slice> slices;
};

void PointOutputs(SliceOutputs& outputs, size_t rows, Slice& slice) {
  constexpr float kUnset = -12345.0f;
  for (auto* values : {&outputs.loss, &outputs.lse, &outputs.entropy, &outputs.target_logprob}) {
    values->assign(rows, kUnset);
  }
  outputs.argmax.assign(rows, -7);
  slice.out = {outputs.loss.data(), outputs.lse.data(), outputs.entropy.data(), outputs.target_logprob.data(),
               outputs.argmax.data()};
}

ChunkBuffers MakeBuffers(const Problem& problem, const RunOptions& options, ChunkRun& run) {
  ChunkBuffers buffers;
  run.slices.resize(problem.slices.size());
  buffers.grad_hidden.resize(problem.slices.size());
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    const SliceData& data = problem.slices[i];
    buffers.hidden.push_back(Encode(problem.hidden_dtype, data.hidden));
    Slice slice;
    slice.rows = data.rows();
    slice.hidden = buffers.hidden.back().data();
    slice.targets = data.targets.data();
    slice.row_weights = DataOrNull(data.row_weights);
    slice.accumulate = DataOrNull(data.accumulate);
    slice.grad_scale = data.grad_scale;
    slice.grad_loss = DataOrNull(data.grad_loss);
    slice.grad_lse = DataOrNull(data.grad_lse);
    slice.grad_entropy = DataOrNull(data.grad_entropy);
    if (data.want_grad_hidden) {
      buffers.grad_hidden[i].assign(buffers.hidden.back().size(), 0xCD);
      slice.grad_hidden =
          options.grad_hidden_in_place ? buffers.hidden.back().data() : buffers.grad_hidden[i].data();
    }
    if (options.want_row_outputs) PointOutputs(run.slices[i], static_cast<size_t>(data.rows()), slice);
    buffers.slices.push_back(slice);
  }
  return buffers;
}

double LogitTolerance(DType compute, const reference::Result& want, size_t row) {
  return ToleranceFor(compute).logit * (1.0 + want.max_abs_logit[row]);
}

// |dloss| for a unit error of a logit: class weights, and 2 lambda lse with a z-loss.
double LossTolerance(DType compute, const Problem& problem, const SliceData& slice,
                     const reference::Result& want, size_t row) {
  double largest_weight = 1.0;
  if (problem.options.use_class_weights) {
    for (float u : problem.class_weights) largest_weight = std::max(largest_weight, std::fabs(double{u}));
  }
  const double slope = 2.0 * double{problem.options.z_loss} * std::fabs(want.lse[row]);
  const double row_weight = slice.row_weights.empty() ? 1.0 : std::fabs(double{slice.row_weights[row]});
  return row_weight * (largest_weight + slope) * LogitTolerance(compute, want, row) +
         UnitRoundoff(DType::kFloat32) * std::fabs(want.loss[row]);
}

void ExpectRowMatches(DType compute, const Problem& problem, const SliceData& slice,
                      const reference::Result& want, const SliceOutputs& got, size_t row) {
  const double logit = LogitTolerance(compute, want, row);
  const double log_v = std::log(static_cast<double>(problem.config.vocab_size));
  EXPECT_NEAR(got.loss[row], want.loss[row], LossTolerance(compute, problem, slice, want, row))
      << "row " << row;
  EXPECT_NEAR(got.lse[row], want.lse[row], logit) << "row " << row;
  EXPECT_NEAR(got.target_logprob[row], want.target_logprob[row], 2 * logit) << "row " << row;
  EXPECT_NEAR(got.entropy[row], want.entropy[row], (1.0 + log_v) * logit) << "row " << row;
  if (want.top_gap[row] > 2 * logit) {
    EXPECT_EQ(got.argmax[row], want.argmax[row]) << "row " << row;
  }
}

void ExpectIgnoredRow(const SliceOutputs& got, size_t row, int64_t hidden_size) {
  EXPECT_EQ(got.loss[row], 0.0f) << "ignored row " << row;
  EXPECT_EQ(got.lse[row], 0.0f) << "ignored row " << row;
  EXPECT_EQ(got.entropy[row], 0.0f) << "ignored row " << row;
  EXPECT_EQ(got.target_logprob[row], 0.0f) << "ignored row " << row;
  EXPECT_EQ(got.argmax[row], -1) << "ignored row " << row;
  if (got.grad_hidden.empty()) return;
  const auto begin = got.grad_hidden.begin() + static_cast<int64_t>(row) * hidden_size;
  EXPECT_TRUE(std::all_of(begin, begin + hidden_size, [](float g) { return g == 0.0f; })) << "row " << row;
}

bool HasGradient(const Problem& problem, const SliceData& slice, size_t row) {
  const bool accumulated =
      problem.accumulate_gradients && (slice.accumulate.empty() || slice.accumulate[row] != 0);
  return slice.targets[row] != kIgnoredTarget && (slice.want_grad_hidden || accumulated);
}

// Of the rows with a gradient.
double DroppedMass(const Problem& problem, const SliceData& slice, const reference::Result& want) {
  double sum = 0.0;
  for (size_t row = 0; row < want.dropped_mass.size(); ++row) {
    if (HasGradient(problem, slice, row)) sum += want.dropped_mass[row];
  }
  return sum;
}

// Whatever an error of the logits could move over the threshold is allowed for.
void ExpectDroppedMassMatches(DType compute, const Problem& problem, const SliceData& slice,
                              const reference::Result& want, double got) {
  const double dropped = DroppedMass(problem, slice, want);
  double tolerance = 1e-6 * static_cast<double>(want.dropped_mass.size());
  if (problem.options.algorithm != Algorithm::kExact) {
    const auto p = reference::Probabilities(ReferenceHead(problem), problem.options, ReferenceRows(slice));
    const auto vocab = static_cast<size_t>(problem.config.vocab_size);
    for (size_t i = 0; i < p.size(); ++i) {
      const double logit = 2.0 * LogitTolerance(compute, want, i / vocab);
      const double epsilon = double{problem.options.filter_epsilon};
      if (p[i] < epsilon) tolerance += p[i] * logit;
      if (p[i] > epsilon * std::exp(-logit) && p[i] < epsilon * std::exp(logit)) tolerance += p[i];
    }
  }
  EXPECT_NEAR(got, dropped, tolerance);
}

void ExpectSumsMatch(DType compute, const Problem& problem, const SliceData& slice,
                     const reference::Result& want, const SliceSums& got, bool with_entropy) {
  double loss_tolerance = 1e-12;
  double entropy_tolerance = 1e-12;
  int64_t undecided = 0;
  for (size_t row = 0; row < want.loss.size(); ++row) {
    if (slice.targets[row] == kIgnoredTarget) continue;
    loss_tolerance += LossTolerance(compute, problem, slice, want, row);
    entropy_tolerance +=
        (1.0 + std::log(static_cast<double>(problem.config.vocab_size))) * LogitTolerance(compute, want, row);
    if (want.top_gap[row] <= 2 * LogitTolerance(compute, want, row)) ++undecided;
  }
  EXPECT_NEAR(got.loss, want.loss_sum, loss_tolerance);
  EXPECT_NEAR(got.z_loss, want.z_loss_sum, loss_tolerance);
  if (with_entropy) {
    EXPECT_NEAR(got.entropy, want.entropy_sum, entropy_tolerance);
  }
  ExpectDroppedMassMatches(compute, problem, slice, want, got.dropped_mass);
  EXPECT_EQ(got.valid_rows, want.valid_rows);
  EXPECT_NEAR(static_cast<double>(got.correct_rows), static_cast<double>(want.correct_rows),
              static_cast<double>(undecided));
}

// Bytes of a slice's hidden states.
int64_t RetainedBytesOf(const Problem& problem, const SliceData& slice) {
  return slice.rows() * problem.config.hidden_size * static_cast<int64_t>(SizeOf(problem.hidden_dtype));
}

void PlaceRetained(const Problem& problem, const RunOptions& options, Chunk& chunk) {
  chunk.retained = options.retained;
  int64_t offset = 0;
  for (size_t i = 0; i < chunk.slices.size(); ++i) {
    chunk.slices[i].retained_offset = offset;
    if (options.take_retained) chunk.slices[i].hidden = nullptr;
    offset += RetainedBytesOf(problem, problem.slices[i]);
  }
}

bool AnyGradEntropy(const Problem& problem) {
  for (const SliceData& slice : problem.slices) {
    for (size_t row = 0; row < slice.grad_entropy.size(); ++row) {
      if (slice.targets[row] != kIgnoredTarget && slice.grad_entropy[row] != 0.0f) return true;
    }
  }
  return false;
}

// What a backend decides for the chunk as a whole.
bool IsFiltered(const Problem& problem) {
  if (!WhyNotFiltered(problem.options, AnyGradEntropy(problem)).empty()) return false;
  if (problem.options.algorithm != Algorithm::kAuto) return true;
  double dropped = 0.0;
  int64_t rows = 0;
  for (const SliceData& slice : problem.slices) {
    const auto result =
        reference::Compute(ReferenceHead(problem), problem.options, ReferenceRows(slice), nullptr);
    dropped += DroppedMass(problem, slice, result);
    for (size_t row = 0; row < slice.targets.size(); ++row) rows += HasGradient(problem, slice, row) ? 1 : 0;
  }
  return dropped <= double{problem.options.max_dropped_mass} * static_cast<double>(rows);
}

}  // namespace

Rng FreshRng() {
  const char* fixed = std::getenv("LOSSD_TEST_SEED");
  const uint64_t seed = fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
  std::cout << "LOSSD_TEST_SEED=" << seed << std::endl;
  return Rng(seed);
}

float Uniform(Rng& rng, float low, float high) {
  return std::uniform_real_distribution<float>(low, high)(rng);
}

int64_t UniformInt(Rng& rng, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

bool Chance(Rng& rng, double probability) { return std::bernoulli_distribution(probability)(rng); }

float RoundTo(DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat32:
      return value;
    case DType::kFloat16:
      return static_cast<float>(Eigen::half(value));
    case DType::kBFloat16:
      return static_cast<float>(Eigen::bfloat16(value));
  }
  return value;
}

std::vector<uint8_t> Encode(DType dtype, absl::Span<const float> values) {
  switch (dtype) {
    case DType::kFloat32:
      return EncodeAs<float>(values);
    case DType::kFloat16:
      return EncodeAs<Eigen::half>(values);
    case DType::kBFloat16:
      return EncodeAs<Eigen::bfloat16>(values);
  }
  return {};
}

std::vector<float> Decode(DType dtype, absl::Span<const uint8_t> bytes) {
  switch (dtype) {
    case DType::kFloat32:
      return DecodeAs<float>(bytes);
    case DType::kFloat16:
      return DecodeAs<Eigen::half>(bytes);
    case DType::kBFloat16:
      return DecodeAs<Eigen::bfloat16>(bytes);
  }
  return {};
}

int64_t Problem::rows() const {
  int64_t total = 0;
  for (const SliceData& slice : slices) total += slice.rows();
  return total;
}

std::vector<float>& Problem::Values(Param param) {
  return const_cast<std::vector<float>&>(std::as_const(*this).Values(param));
}

const std::vector<float>& Problem::Values(Param param) const {
  switch (param) {
    case Param::kBias:
      return bias;
    case Param::kNormGain:
      return norm_gain;
    case Param::kNormShift:
      return norm_shift;
    case Param::kClassWeights:
      return class_weights;
    default:
      return weight;
  }
}

SliceData MakeSlice(const ProblemSpec& spec, int64_t rows, Rng& rng) {
  SliceData slice;
  slice.hidden = Normal(rng, rows * spec.config.hidden_size, 0.1f, 1.0f, spec.hidden_dtype);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t target = UniformInt(rng, 0, spec.config.vocab_size - 1);
    slice.targets.push_back(Chance(rng, spec.ignored) ? kIgnoredTarget : static_cast<int32_t>(target));
  }
  slice.grad_scale = spec.grad_scale;
  if (spec.row_weights) slice.row_weights = UniformVector(rng, rows, 0.0f, 2.0f);
  if (spec.grad_loss) slice.grad_loss = UniformVector(rng, rows, -1.0f, 1.0f);
  if (spec.grad_lse) slice.grad_lse = UniformVector(rng, rows, -1.0f, 1.0f);
  if (spec.grad_entropy) slice.grad_entropy = UniformVector(rng, rows, -1.0f, 1.0f);
  if (spec.accumulate_mask) {
    for (int64_t i = 0; i < rows; ++i) slice.accumulate.push_back(Chance(rng, 0.6) ? 1 : 0);
  }
  return slice;
}

Problem MakeProblem(const ProblemSpec& spec, Rng& rng) {
  Problem problem;
  problem.config = spec.config;
  problem.options = spec.options;
  problem.hidden_dtype = spec.hidden_dtype;
  const int64_t d = spec.config.hidden_size;
  const int64_t v = spec.config.vocab_size;
  const float deviation = spec.logit_deviation / std::sqrt(static_cast<float>(d));
  problem.weight = Normal(rng, v * d, 0.0f, deviation, spec.config.compute_dtype);
  if (spec.config.has_bias) problem.bias = UniformVector(rng, v, -1.0f, 1.0f);
  if (spec.config.has_class_weights) problem.class_weights = UniformVector(rng, v, 0.25f, 2.0f);
  if (spec.config.norm != Norm::kNone) problem.norm_gain = UniformVector(rng, d, 0.5f, 1.5f);
  if (spec.config.norm == Norm::kLayerNorm) problem.norm_shift = UniformVector(rng, d, -0.5f, 0.5f);
  for (int64_t rows : spec.slice_rows) problem.slices.push_back(MakeSlice(spec, rows, rng));
  return problem;
}

ProblemSpec RandomSpec(int64_t rows, int64_t hidden_size, int64_t vocab_size, DType hidden_dtype,
                       DType compute, Rng& rng) {
  ProblemSpec spec;
  spec.hidden_dtype = hidden_dtype;
  spec.config.hidden_size = hidden_size;
  spec.config.vocab_size = vocab_size;
  spec.config.compute_dtype = compute;
  spec.config.has_bias = Chance(rng, 0.5);
  spec.config.has_class_weights = Chance(rng, 0.5);
  spec.config.norm = static_cast<Norm>(UniformInt(rng, 0, 2));
  spec.config.norm_epsilon = 1e-3f;
  spec.config.optimizer_state = OptimizerState::kNone;
  if (Chance(rng, 0.5)) spec.options.logit_scale = Uniform(rng, 0.3f, 1.5f);
  if (Chance(rng, 0.5)) spec.options.softcap = Uniform(rng, 5.0f, 30.0f);
  if (Chance(rng, 0.5)) spec.options.label_smoothing = Uniform(rng, 0.0f, 0.3f);
  if (Chance(rng, 0.5)) spec.options.z_loss = Uniform(rng, 0.0f, 1e-2f);
  spec.options.use_class_weights = spec.config.has_class_weights && Chance(rng, 0.7);
  if (Chance(rng, 0.5)) {
    spec.options.algorithm = Chance(rng, 0.5) ? Algorithm::kFiltered : Algorithm::kAuto;
    spec.options.filter_epsilon = Chance(rng, 0.2) ? 0.0f : Uniform(rng, 1e-4f, 1e-2f);
    spec.options.max_dropped_mass = Chance(rng, 0.5) ? 1.0f : 0.0f;
  }
  spec.row_weights = Chance(rng, 0.5);
  spec.accumulate_mask = Chance(rng, 0.5);
  spec.grad_loss = Chance(rng, 0.5);
  spec.grad_lse = Chance(rng, 0.3);
  spec.grad_entropy = Chance(rng, 0.3);
  spec.grad_scale = Uniform(rng, 0.1f, 2.0f);
  spec.slice_rows.clear();
  for (int64_t left = rows; left > 0;) {
    const int64_t take = UniformInt(rng, 1, left);
    spec.slice_rows.push_back(take);
    left -= take;
  }
  return spec;
}

std::string Describe(const Problem& problem) {
  const HeadConfig& config = problem.config;
  const LossOptions& options = problem.options;
  std::vector<int64_t> rows;
  for (const SliceData& slice : problem.slices) rows.push_back(slice.rows());
  std::string text =
      absl::StrCat("slices [", absl::StrJoin(rows, " "), "] D ", config.hidden_size, " V ", config.vocab_size,
                   " hidden ", Name(problem.hidden_dtype), " compute ", Name(config.compute_dtype), " norm ",
                   Name(config.norm), " bias ", config.has_bias, " scale ", options.logit_scale, " softcap ",
                   options.softcap, " smoothing ", options.label_smoothing, " z_loss ", options.z_loss,
                   " class weights ", options.use_class_weights, " algorithm ", Name(options.algorithm),
                   " epsilon ", options.filter_epsilon, " dropped at most ", options.max_dropped_mass);
  if (problem.slices.empty()) return text;
  const SliceData& first = problem.slices.front();
  absl::StrAppend(&text, " row weights ", !first.row_weights.empty(), " mask ", !first.accumulate.empty(),
                  " grad_loss ", !first.grad_loss.empty(), " grad_lse ", !first.grad_lse.empty(),
                  " grad_entropy ", !first.grad_entropy.empty(), " grad_scale ", first.grad_scale);
  return text;
}

std::unique_ptr<HeadKernels> MakeHead(Backend& backend, const Problem& problem) {
  auto head = backend.CreateHead(problem.config);
  if (!head.ok()) {
    ADD_FAILURE() << head.status();
    return nullptr;
  }
  for (Param param : kAllParams) {
    const std::vector<float>& values = problem.Values(param);
    if (!HasTensor(problem.config, {param, Role::kValue})) continue;
    const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
    const absl::Status written =
        (*head)->WriteTensor({param, Role::kValue}, 0, ShapeOf(problem.config, param).rows, DType::kFloat32,
                             absl::MakeConstSpan(bytes, values.size() * sizeof(float)));
    EXPECT_TRUE(written.ok()) << written;
  }
  return *std::move(head);
}

int64_t RetainedBytes(const Problem& problem) {
  int64_t bytes = 0;
  for (const SliceData& slice : problem.slices) bytes += RetainedBytesOf(problem, slice);
  return bytes;
}

ChunkRun RunChunk(HeadKernels& head, const Problem& problem, const RunOptions& options) {
  ChunkRun run;
  ChunkBuffers buffers = MakeBuffers(problem, options, run);
  Chunk chunk;
  chunk.options = problem.options;
  chunk.hidden_dtype = problem.hidden_dtype;
  chunk.accumulate_gradients = problem.accumulate_gradients;
  chunk.independent = options.independent;
  chunk.slices = absl::MakeSpan(buffers.slices);
  if (options.retained != nullptr) PlaceRetained(problem, options, chunk);
  absl::Notification have_results;
  absl::Notification done;
  ChunkCallbacks callbacks;
  callbacks.on_results = [&](absl::Status status) {
    run.results = std::move(status);
    EXPECT_FALSE(done.HasBeenNotified()) << "on_done ran before on_results";
    have_results.Notify();
  };
  callbacks.on_done = [&](absl::Status status) {
    EXPECT_TRUE(have_results.HasBeenNotified()) << "on_done ran before on_results";
    run.done = std::move(status);
    done.Notify();
  };
  head.Submit(&chunk, std::move(callbacks));
  done.WaitForNotification();
  run.choices = std::move(chunk.choices);
  run.algorithm = chunk.algorithm;
  for (size_t i = 0; i < run.slices.size(); ++i) {
    const Slice& slice = buffers.slices[i];
    run.slices[i].sums = slice.sums;
    run.slices[i].first_nonfinite_row = slice.first_nonfinite_row;
    if (slice.grad_hidden == nullptr) continue;
    run.slices[i].grad_hidden = Decode(
        problem.hidden_dtype, options.grad_hidden_in_place ? buffers.hidden[i] : buffers.grad_hidden[i]);
  }
  return run;
}

std::vector<float> ReadAll(HeadKernels& head, TensorId id) {
  const TensorShape shape = ShapeOf(head.config(), id.param);
  std::vector<uint8_t> bytes(static_cast<size_t>(shape.elements()) * sizeof(float));
  const absl::Status status = head.ReadTensor(id, 0, shape.rows, DType::kFloat32, absl::MakeSpan(bytes));
  EXPECT_TRUE(status.ok()) << status;
  return Decode(DType::kFloat32, bytes);
}

std::vector<float> ReadGradient(HeadKernels& head, Param param) {
  return ReadAll(head, {param, Role::kGradient});
}

reference::Head ReferenceHead(const Problem& problem) {
  return {problem.config,
          ToDouble(problem.weight),
          ToDouble(problem.bias),
          ToDouble(problem.norm_gain),
          ToDouble(problem.norm_shift),
          ToDouble(problem.class_weights)};
}

reference::Rows ReferenceRows(const SliceData& slice) {
  return {ToDouble(slice.hidden),      slice.targets,
          ToDouble(slice.row_weights), slice.accumulate,
          double{slice.grad_scale},    ToDouble(slice.grad_loss),
          ToDouble(slice.grad_lse),    ToDouble(slice.grad_entropy)};
}

std::vector<reference::Result> ComputeReference(const Problem& problem,
                                                reference::ParamGradients* gradients) {
  const reference::Head head = ReferenceHead(problem);
  LossOptions options = problem.options;
  if (!IsFiltered(problem)) options.algorithm = Algorithm::kExact;
  std::vector<reference::Result> results;
  for (const SliceData& slice : problem.slices) {
    results.push_back(reference::Compute(head, options, ReferenceRows(slice),
                                         problem.accumulate_gradients ? gradients : nullptr));
  }
  return results;
}

Problem WithClearEpsilon(Problem problem) {
  if (problem.options.algorithm == Algorithm::kExact) return problem;
  std::vector<double> p;
  for (const SliceData& slice : problem.slices) {
    const auto more = reference::Probabilities(ReferenceHead(problem), problem.options, ReferenceRows(slice));
    p.insert(p.end(), more.begin(), more.end());
  }
  std::sort(p.begin(), p.end());
  const double epsilon = double{problem.options.filter_epsilon};
  if (epsilon == 0.0) return problem;
  constexpr double kNear = 1.5;
  double widest = 1.0;
  for (size_t i = 1; i < p.size() && p[i - 1] <= kNear * epsilon; ++i) {
    if (p[i] < epsilon / kNear || p[i] <= widest * p[i - 1]) continue;
    widest = p[i] / p[i - 1];
    problem.options.filter_epsilon = static_cast<float>(std::sqrt(p[i - 1] * p[i]));
  }
  return problem;
}

double MaxAbsLogit(absl::Span<const reference::Result> results) {
  double largest = 0.0;
  for (const reference::Result& result : results) {
    for (double z : result.max_abs_logit) largest = std::max(largest, z);
  }
  return largest;
}

void ExpectSliceMatches(DType compute, const Problem& problem, const SliceData& slice,
                        const reference::Result& want, const SliceOutputs& got) {
  EXPECT_EQ(got.first_nonfinite_row, -1);
  ExpectSumsMatch(compute, problem, slice, want, got.sums, !got.entropy.empty());
  for (size_t row = 0; row < got.loss.size(); ++row) {
    if (slice.targets[row] == kIgnoredTarget) {
      ExpectIgnoredRow(got, row, problem.config.hidden_size);
    } else {
      ExpectRowMatches(compute, problem, slice, want, got, row);
    }
  }
  if (!slice.want_grad_hidden) return;
  ExpectGradientNear("grad_hidden", got.grad_hidden, want.grad_hidden, compute, problem.hidden_dtype,
                     MaxAbsLogit({&want, 1}));
}

void ExpectGradientsMatch(HeadKernels& head, const reference::ParamGradients& want, double max_abs_logit) {
  const std::pair<Param, const reference::Gradient*> params[] = {{Param::kWeight, &want.weight},
                                                                 {Param::kBias, &want.bias},
                                                                 {Param::kNormGain, &want.norm_gain},
                                                                 {Param::kNormShift, &want.norm_shift}};
  for (const auto& [param, gradient] : params) {
    if (!HasTensor(head.config(), {param, Role::kGradient})) continue;
    ExpectGradientNear(std::string(Name(param)).c_str(), ReadGradient(head, param), *gradient,
                       head.compute_dtype(), DType::kFloat32, max_abs_logit);
  }
}

void RunAndCompare(Backend& backend, const std::vector<Problem>& chunks, const RunOptions& options) {
  const std::unique_ptr<HeadKernels> head = MakeHead(backend, chunks.front());
  ASSERT_NE(head, nullptr);
  reference::ParamGradients gradients = reference::ZeroGradients(chunks.front().config);
  double max_abs_logit = 0.0;
  for (const Problem& chunk : chunks) {
    const Problem problem = WithClearEpsilon(chunk);
    SCOPED_TRACE(Describe(problem));
    const std::vector<reference::Result> want = ComputeReference(problem, &gradients);
    const ChunkRun got = RunChunk(*head, problem, options);
    ASSERT_TRUE(got.results.ok()) << got.results;
    ASSERT_TRUE(got.done.ok()) << got.done;
    for (size_t i = 0; i < want.size(); ++i) {
      SCOPED_TRACE(absl::StrCat("slice ", i));
      ExpectSliceMatches(head->compute_dtype(), problem, problem.slices[i], want[i], got.slices[i]);
    }
    max_abs_logit = std::max(max_abs_logit, MaxAbsLogit(want));
  }
  SCOPED_TRACE(Describe(chunks.front()));
  if (head->config().trainable) ExpectGradientsMatch(*head, gradients, max_abs_logit);
}

}  // namespace lossd::kernels::testing
