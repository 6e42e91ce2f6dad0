// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/chunk_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "tests/kernels/comparison.h"

namespace lossd::kernels::testing {
namespace {

template <typename T>
const T* DataOrNull(const std::vector<T>& values) {
  return values.empty() ? nullptr : values.data();
}

absl::Span<uint8_t>& RowMemory() {
  static absl::Span<uint8_t> memory;
  return memory;
}

// Inputs and outputs of a chunk, and the Slices that point to them.
struct ChunkBuffers {
  std::vector<SliceData> inputs;
  std::vector<absl::Span<uint8_t>> hidden;
  std::vector<absl::Span<uint8_t>> grad_hidden;
  std::vector<absl::Span<uint8_t>> teacher_hidden;
  std::vector<Slice> slices;
  absl::Span<uint8_t> memory;                              // RowMemory, or the chunk's part of it
  std::vector<std::unique_ptr<std::vector<uint8_t>>> own;  // of rows that have no room there
  size_t used = 0;                                         // of `memory`
};

// Memory for rows, aligned as staging memory.
absl::Span<uint8_t> Room(ChunkBuffers& buffers, size_t bytes) {
  constexpr size_t kAlignment = 64;
  const absl::Span<uint8_t> memory = buffers.memory;
  if (bytes <= memory.size() && buffers.used <= memory.size() - bytes) {
    const absl::Span<uint8_t> room = memory.subspan(buffers.used, bytes);
    buffers.used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return room;
  }
  buffers.own.push_back(std::make_unique<std::vector<uint8_t>>(bytes));
  return absl::MakeSpan(*buffers.own.back());
}

// A backend that looked at the inputs after its results were there would find these.
void SpoilInputs(ChunkBuffers& buffers) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (SliceData& data : buffers.inputs) {
    std::fill(data.targets.begin(), data.targets.end(), std::numeric_limits<int32_t>::max());
    std::fill(data.classes.begin(), data.classes.end(), std::numeric_limits<int32_t>::max());
    std::fill(data.target_classes.begin(), data.target_classes.end(), std::numeric_limits<int32_t>::max());
    std::fill(data.accumulate.begin(), data.accumulate.end(), uint8_t{1});
    for (auto* values : {&data.row_weights, &data.grad_loss, &data.grad_lse, &data.grad_entropy,
                         &data.advantages, &data.old_logprobs, &data.ref_logprobs, &data.target_weights}) {
      std::fill(values->begin(), values->end(), kNan);
    }
  }
  for (auto* all : {&buffers.hidden, &buffers.grad_hidden, &buffers.teacher_hidden}) {
    for (const absl::Span<uint8_t> bytes : *all) std::fill(bytes.begin(), bytes.end(), uint8_t{0xff});
  }
}

constexpr float kUnset = -12345.0f;

void PointClasses(const SliceData& data, SliceOutputs& outputs, Slice& slice) {
  const auto rows = static_cast<size_t>(data.rows());
  outputs.class_logprobs.assign(rows * static_cast<size_t>(data.class_count), kUnset);
  const auto top_k = static_cast<size_t>(std::max(data.top_k, 0));
  outputs.top_logprobs.assign(rows * top_k, kUnset);
  outputs.top_classes.assign(rows * top_k, -7);
  slice.classes = data.classes.data();
  slice.class_count = data.class_count;
  slice.shared_classes = data.shared_classes;
  slice.top_k = data.top_k;
  slice.out.class_logprobs = outputs.class_logprobs.data();
  slice.out.top_logprobs = outputs.top_logprobs.data();
  slice.out.top_classes = outputs.top_classes.data();
}

void PointOutputs(SliceOutputs& outputs, size_t rows, Slice& slice) {
  for (auto* values : {&outputs.loss, &outputs.lse, &outputs.entropy, &outputs.target_logprob}) {
    values->assign(rows, kUnset);
  }
  outputs.argmax.assign(rows, -7);
  slice.out.loss = outputs.loss.data();
  slice.out.lse = outputs.lse.data();
  slice.out.entropy = outputs.entropy.data();
  slice.out.target_logprob = outputs.target_logprob.data();
  slice.out.argmax = outputs.argmax.data();
}

ChunkBuffers MakeBuffers(const Problem& problem, const RunOptions& options, absl::Span<uint8_t> memory,
                         ChunkRun& run) {
  ChunkBuffers buffers;
  buffers.memory = memory;
  buffers.inputs = problem.slices;
  run.slices.resize(problem.slices.size());
  buffers.grad_hidden.resize(problem.slices.size());
  for (size_t i = 0; i < problem.slices.size(); ++i) {
    const SliceData& data = buffers.inputs[i];
    const std::vector<uint8_t> hidden = Encode(problem.hidden_dtype, data.hidden);
    buffers.hidden.push_back(Room(buffers, hidden.size()));
    std::copy(hidden.begin(), hidden.end(), buffers.hidden.back().begin());
    Slice slice;
    slice.rows = data.rows();
    if (problem.options.embedding != Embedding::kRows) slice.hidden = buffers.hidden.back().data();
    slice.targets = data.targets.data();
    slice.row_weights = DataOrNull(data.row_weights);
    slice.accumulate = DataOrNull(data.accumulate);
    slice.grad_scale = data.grad_scale;
    slice.grad_loss = DataOrNull(data.grad_loss);
    slice.grad_lse = DataOrNull(data.grad_lse);
    slice.grad_entropy = DataOrNull(data.grad_entropy);
    slice.advantages = DataOrNull(data.advantages);
    slice.old_logprobs = DataOrNull(data.old_logprobs);
    slice.ref_logprobs = DataOrNull(data.ref_logprobs);
    slice.target_classes = DataOrNull(data.target_classes);
    slice.target_weights = DataOrNull(data.target_weights);
    slice.target_count = data.target_count;
    slice.sample_seed = data.sample_seed;
    slice.first_row = data.first_row;
    slice.stands_in = data.stands_in;
    if (!problem.teacher.empty()) {
      const std::vector<uint8_t> teaching = Encode(problem.hidden_dtype, data.teacher_hidden);
      buffers.teacher_hidden.push_back(Room(buffers, teaching.size()));
      std::copy(teaching.begin(), teaching.end(), buffers.teacher_hidden.back().begin());
      slice.teacher_hidden = buffers.teacher_hidden.back().data();
    }
    if (data.want_grad_hidden) {
      if (!options.grad_hidden_in_place) buffers.grad_hidden[i] = Room(buffers, hidden.size());
      std::fill(buffers.grad_hidden[i].begin(), buffers.grad_hidden[i].end(), uint8_t{0xCD});
      slice.grad_hidden =
          options.grad_hidden_in_place ? buffers.hidden.back().data() : buffers.grad_hidden[i].data();
    }
    if (options.want_row_outputs) PointOutputs(run.slices[i], static_cast<size_t>(data.rows()), slice);
    PointClasses(data, run.slices[i], slice);
    buffers.slices.push_back(slice);
  }
  return buffers;
}

void TakeGradients(const Problem& problem, const RunOptions& options, const ChunkBuffers& buffers,
                   ChunkRun& run) {
  for (size_t i = 0; i < run.slices.size(); ++i) {
    if (buffers.slices[i].grad_hidden == nullptr) continue;
    run.slices[i].grad_hidden = Decode(
        problem.hidden_dtype, options.grad_hidden_in_place ? buffers.hidden[i] : buffers.grad_hidden[i]);
  }
}

// Bytes of a slice's hidden states.
int64_t RetainedBytesOf(const Problem& problem, const SliceData& slice) {
  return slice.rows() * problem.config.hidden_size * static_cast<int64_t>(SizeOf(problem.hidden_dtype));
}

// Hidden states that are taken from there lie nowhere else.
void PlaceRetained(const Problem& problem, const RunOptions& options, ChunkBuffers& buffers, Chunk& chunk) {
  chunk.retained = options.retained;
  int64_t offset = 0;
  for (size_t i = 0; i < chunk.slices.size(); ++i) {
    const RetainedPlace place = options.places.empty()
                                    ? RetainedPlace{.offset = offset, .take = options.take_retained}
                                    : options.places[i];
    offset += RetainedBytesOf(problem, problem.slices[i]);
    chunk.slices[i].retained_offset = place.offset;
    if (!place.take) continue;
    chunk.slices[i].hidden = nullptr;
    std::fill(buffers.hidden[i].begin(), buffers.hidden[i].end(), uint8_t{0xff});
  }
}

}  // namespace

void SetRowMemory(absl::Span<uint8_t> memory) { RowMemory() = memory; }

void ExpectSameRows(const SliceOutputs& got, const SliceOutputs& want) {
  EXPECT_EQ(got.loss, want.loss);
  EXPECT_EQ(got.lse, want.lse);
  EXPECT_EQ(got.entropy, want.entropy);
  EXPECT_EQ(got.target_logprob, want.target_logprob);
  EXPECT_EQ(got.argmax, want.argmax);
  EXPECT_EQ(got.class_logprobs, want.class_logprobs);
  EXPECT_EQ(got.top_logprobs, want.top_logprobs);
  EXPECT_EQ(got.top_classes, want.top_classes);
  EXPECT_EQ(got.grad_hidden, want.grad_hidden);
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

namespace {

// A chunk from its submission until it is done.
class SubmittedChunk {
 public:
  // `problem` outlives it. `memory`: of rows, while it is in flight.
  SubmittedChunk(HeadKernels& head, const Problem& problem, const RunOptions& options,
                 absl::Span<uint8_t> memory)
      : problem_(problem), options_(options), buffers_(MakeBuffers(problem, options, memory, run_)) {
    chunk_.options = problem.options;
    chunk_.hidden_dtype = problem.hidden_dtype;
    chunk_.accumulate_gradients = problem.accumulate_gradients;
    chunk_.independent = options.independent;
    chunk_.teacher = options.teacher;
    chunk_.slices = absl::MakeSpan(buffers_.slices);
    if (options.retained != nullptr) PlaceRetained(problem, options, buffers_, chunk_);
    ChunkCallbacks callbacks;
    callbacks.on_results = [this](absl::Status status) {
      run_.results = std::move(status);
      EXPECT_FALSE(done_.HasBeenNotified()) << "on_done ran before on_results";
      TakeGradients(problem_, options_, buffers_, run_);
      SpoilInputs(buffers_);
      have_results_.Notify();
    };
    callbacks.on_done = [this](absl::Status status) {
      EXPECT_TRUE(have_results_.HasBeenNotified()) << "on_done ran before on_results";
      run_.done = std::move(status);
      done_.Notify();
    };
    head.Submit(&chunk_, std::move(callbacks));
  }
  SubmittedChunk(const SubmittedChunk&) = delete;
  SubmittedChunk& operator=(const SubmittedChunk&) = delete;

  // Waits until it is done. Once.
  ChunkRun Take() {
    done_.WaitForNotification();
    run_.choices = std::move(chunk_.choices);
    run_.gradients = chunk_.gradients;
    run_.sample_threshold = chunk_.sample_threshold;
    for (size_t i = 0; i < run_.slices.size(); ++i) {
      const Slice& slice = buffers_.slices[i];
      run_.slices[i].sums = slice.sums;
      run_.slices[i].first_nonfinite_row = slice.first_nonfinite_row;
    }
    return std::move(run_);
  }

 private:
  const Problem& problem_;
  const RunOptions options_;
  ChunkRun run_;
  ChunkBuffers buffers_;
  Chunk chunk_;
  absl::Notification have_results_, done_;
};

}  // namespace

ChunkRun RunChunk(HeadKernels& head, const Problem& problem, const RunOptions& options) {
  return SubmittedChunk(head, problem, options, RowMemory()).Take();
}

std::vector<ChunkRun> RunInFlight(absl::Span<const ChunkToRun> chunks, int most) {
  std::vector<ChunkRun> runs;
  std::deque<std::unique_ptr<SubmittedChunk>> in_flight;
  const auto take = [&] {
    runs.push_back(in_flight.front()->Take());
    in_flight.pop_front();
  };
  // One part of the memory for each chunk in flight, which end in order.
  constexpr size_t kAlignment = 64;
  const size_t part = RowMemory().size() / static_cast<size_t>(most) / kAlignment * kAlignment;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (static_cast<int>(in_flight.size()) == most) take();
    const ChunkToRun& chunk = chunks[i];
    const absl::Span<uint8_t> memory = RowMemory().subspan(i % static_cast<size_t>(most) * part, part);
    in_flight.push_back(std::make_unique<SubmittedChunk>(*chunk.head, *chunk.problem, chunk.options, memory));
  }
  while (!in_flight.empty()) take();
  return runs;
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

DeferredRows::DeferredRows(Backend& backend, const ProblemSpec& spec, Rng& rng)
    : spec_(spec), rng_(&rng), problem_(MakeProblem(spec, rng)) {
  problem_.slices.clear();
  place_bytes_ = kMostRows * spec.config.hidden_size * static_cast<int64_t>(SizeOf(problem_.hidden_dtype));
  auto retained = backend.AllocateRetained(static_cast<int64_t>(kPlaces) * place_bytes_);
  EXPECT_TRUE(retained.ok()) << retained.status();
  retained_ = *std::move(retained);
  head_ = MakeHead(backend, problem_);
  gradients_ = reference::ZeroGradients(problem_.config);
}

SliceData DeferredRows::NewSlice() { return MakeSlice(spec_, UniformInt(*rng_, 1, kMostRows), *rng_); }

void DeferredRows::AddDirect(Problem& chunk, std::vector<RetainedPlace>& places, bool want_grad_hidden) {
  SliceData slice = NewSlice();
  slice.want_grad_hidden = want_grad_hidden;
  chunk.slices.push_back(std::move(slice));
  places.push_back({});
}

void DeferredRows::Forward() {
  Problem chunk = problem_;
  chunk.accumulate_gradients = false;
  std::vector<RetainedPlace> places;
  std::vector<size_t> taken;
  for (size_t i = 0; i < kPlaces && taken.size() < 3; ++i) {
    if (kept_[i].has_value() || Chance(*rng_, 0.3)) continue;
    SliceData slice = NewSlice();
    kept_[i] = slice;
    taken.push_back(i);
    slice.want_grad_hidden = false;
    chunk.slices.push_back(std::move(slice));
    places.push_back(PlaceOf(i, /*take=*/false));
  }
  if (Chance(*rng_, 0.5)) AddDirect(chunk, places, /*want_grad_hidden=*/false);
  if (Compute(chunk, places)) return;
  for (const size_t i : taken) kept_[i].reset();
}

void DeferredRows::Backward() {
  Problem chunk = problem_;
  std::vector<RetainedPlace> places;
  std::vector<size_t> order(kPlaces);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), *rng_);
  for (const size_t i : order) {
    if (!kept_[i].has_value() || Chance(*rng_, 0.4)) continue;
    SliceData slice = *kept_[i];
    slice.grad_loss.resize(static_cast<size_t>(slice.rows()));
    for (float& gradient : slice.grad_loss) gradient = Uniform(*rng_, -2.0f, 2.0f);
    slice.want_grad_hidden = Chance(*rng_, 0.8);
    chunk.slices.push_back(std::move(slice));
    places.push_back(PlaceOf(i, /*take=*/true));
    if (Chance(*rng_, 0.3)) AddDirect(chunk, places, Chance(*rng_, 0.8));
  }
  Compute(chunk, places);
}

void DeferredRows::Release() {
  for (std::optional<SliceData>& kept : kept_) {
    if (Chance(*rng_, 0.5)) kept.reset();
  }
}

void DeferredRows::ZeroGradients() {
  const absl::Status status = head_->ZeroGradients();
  EXPECT_TRUE(status.ok()) << status;
  gradients_ = reference::ZeroGradients(problem_.config);
}

void DeferredRows::ExpectGradients() { ExpectGradientsMatch(*head_, gradients_, max_abs_logit_); }

bool DeferredRows::Compute(const Problem& chunk, const std::vector<RetainedPlace>& places) {
  if (chunk.slices.empty()) return true;
  SCOPED_TRACE(Describe(chunk));
  const ChunkRun got =
      RunChunk(*head_, chunk,
               {.grad_hidden_in_place = Chance(*rng_, 0.5), .retained = retained_.get(), .places = places});
  if (!got.done.ok()) {
    OnFailure(chunk, got);
    return false;
  }
  const auto want = ComputeReference(chunk, &gradients_);
  for (size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE(i);
    ExpectSliceMatches(head_->compute_dtype(), chunk, chunk.slices[i], want[i], got.slices[i]);
  }
  max_abs_logit_ = std::max(max_abs_logit_, MaxAbsLogit(want));
  return true;
}

void DeferredRows::OnFailure(const Problem& chunk, const ChunkRun& run) {
  EXPECT_TRUE(expect_failures_) << run.done;
  EXPECT_FALSE(run.results.ok());
  ++failures_;
  if (!absl::IsDataLoss(run.done)) return;
  EXPECT_TRUE(chunk.accumulate_gradients) << run.done;
  ZeroGradients();
}

}  // namespace lossd::kernels::testing
