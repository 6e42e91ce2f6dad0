// SPDX-License-Identifier: Apache-2.0
// Device: the backend of the simulation. Its arithmetic is trivial. It records what it accumulated, in which
// order and from which stream, and fails when the plan says so. At every call of it, the scheduler may let
// other tasks run.
//
// The hidden state of a row is (its name, the number of the stream that sent it). For a row with a target,
// loss = name * row weight, argmax = name % kVocab, lse = the version of the weights, and dL/dx = (scale *
// name, a number that identifies the chunk, and the place in it, where the row was computed). A row whose
// name is not finite is bad.
//
// Embedding rows: a row of the weight is (the version of the weights, its id + 1). The gradient of such a row
// is (its name, the number of the stream that sent it), like a hidden state.
#ifndef LOSSD_TESTS_SERVER_ENGINE_SIMULATION_DEVICE_H_
#define LOSSD_TESTS_SERVER_ENGINE_SIMULATION_DEVICE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "tests/server/engine/simulation/scheduler.h"

namespace lossd::engine::simulation {

inline constexpr int64_t kHidden = 2;
inline constexpr int64_t kVocab = 4;
inline constexpr int64_t kMostRows = 64;  // of one microbatch or contribution

// The name of a row. Microbatches and contributions share their ids, so their names never collide.
inline float NameOf(uint64_t id, int64_t row) {
  return static_cast<float>(static_cast<int64_t>(id) * kMostRows + row);
}

// A chunk that accumulated, or rows of a contribution that were added.
struct Added {
  struct Row {
    int64_t name = 0;
    bool accumulated = false;  // false: computed only for its results
    int64_t stream = 0;        // the stream that sent it
    int32_t target = 0;
    float scale = 1.0f;  // only for the gradient of an embedding row
  };
  bool contribution = false;
  bool row_gradients = false;  // the gradients of embedding rows
  std::vector<Row> rows;       // the rows with a target, in order
};

// What was accumulated between two moments at which the gradients were zero.
struct Generation {
  std::vector<Added> added;
  std::map<int64_t, int> times;  // how often each row was accumulated, by name
  // The names of rows whose calls have ended well. They may not have reached the gradients yet, but every
  // later operation must find them there, unless the gradients are broken.
  std::set<int64_t> promised;
  int64_t rows = 0;     // rows of microbatches
  bool broken = false;  // the device failed while it accumulated
  bool has_bad_rows = false;
  bool closed_lazily = false;  // a step with lazy rows closed it
};

// What is wrong with a generation, to which no chunk in flight belongs any more.
std::string CheckPromises(const Generation& generation);

struct Failures {
  std::set<int64_t> results, done;  // numbers of chunks that fail before or after their results
  std::set<int64_t> steps, zeros, adds;
};

class Device;

// One head on the device.
class DeviceHead final : public kernels::HeadKernels {
 public:
  DeviceHead(Device* device, const kernels::HeadConfig& config);
  ~DeviceHead() override;

  const kernels::HeadConfig& config() const override { return config_; }
  kernels::DType compute_dtype() const override { return kernels::DType::kFloat32; }
  int64_t chunk_rows() const override;
  kernels::MemoryBytes memory() const override { return {}; }
  std::vector<kernels::Choice> Describe() const override { return {}; }
  void Submit(kernels::Chunk* chunk, kernels::ChunkCallbacks callbacks) override;
  absl::Status ReadTensor(kernels::TensorId, int64_t, int64_t rows, kernels::DType,
                          absl::Span<uint8_t> out) override;
  absl::Status WriteTensor(kernels::TensorId, int64_t, int64_t, kernels::DType,
                           absl::Span<const uint8_t> in) override;
  absl::Status AddGradient(kernels::Param, int64_t, int64_t, kernels::DType, float,
                           absl::Span<const uint8_t> in) override;
  absl::StatusOr<double> GradNorm() override;
  absl::Status ApplyStep(const kernels::OptimizerOptions&, int64_t update) override;
  absl::Status ZeroGradients() override;
  absl::Status ZeroMoments() override;

  Generation& generation() { return *generations_.back(); }
  // The number of the present generation. Generations of all heads are counted together over the life of the
  // device.
  int64_t generation_number() const { return generation_number_; }
  int64_t version() const { return version_; }

 private:
  friend class Device;
  void Compute(kernels::Chunk& chunk, kernels::ChunkCallbacks& callbacks);
  void ComputeSlice(const kernels::Chunk& chunk, kernels::Slice& slice, int64_t total, int64_t& position,
                    Added& added);
  void EmbedSlice(kernels::Slice& slice);
  void TakeRowGradients(const kernels::Chunk& chunk, kernels::Slice& slice, Added& added);
  // Records the rows of a slice. Nothing of a slice with a bad row is recorded.
  void NoteRows(const kernels::Chunk& chunk, const kernels::Slice& slice, std::vector<Added::Row> rows,
                Added& added);
  // Checks the fields of kernels::Slice that are for embedding rows.
  void CheckEmbedding(const kernels::Chunk& chunk, const kernels::Slice& slice);
  void Restart();
  // Reports a violation if other work of the head is on the device.
  void CheckIdle(const char* what);

  Device* const device_;
  const kernels::HeadConfig config_;
  std::vector<Generation*> generations_;
  int64_t generation_number_ = 0;
  int64_t version_ = 0;
  int in_flight_ = 0;
};

class Device final : public kernels::Backend {
 public:
  // `violation` is called for each breach of the contract of kernels/backend.h.
  Device(Scheduler* scheduler, std::function<void(std::string)> violation)
      : scheduler_(scheduler), violation_(std::move(violation)) {}

  kernels::BackendInfo info() const override { return {"simulated", "simulated", kernels::DType::kFloat32}; }
  kernels::MemoryStats memory() const override { return {}; }
  int max_chunks_in_flight() const override { return chunks_in_flight; }
  absl::StatusOr<kernels::MemoryBytes> PlanHead(const kernels::HeadConfig&) const override {
    return kernels::MemoryBytes{};
  }
  absl::StatusOr<std::unique_ptr<kernels::HeadKernels>> CreateHead(
      const kernels::HeadConfig& config) override;
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateStaging(int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<kernels::RetainedMemory>> AllocateRetained(int64_t bytes) override;
  absl::Status PlanHostMemory(kernels::MemoryKind, int64_t) override { return absl::OkStatus(); }

  // The task that computes chunks if `asynchronous` is set. It ends after Stop.
  void Work();
  void Stop() { stopping_ = true; }

  // What was accumulated in a generation, also if its head does not exist any more.
  const Generation& Of(int64_t generation) const { return *generations_[static_cast<size_t>(generation)]; }
  // Records that a call has ended well, so that the row must be in the generation's gradients, or reach them
  // later.
  void Promise(int64_t generation, int64_t name) {
    generations_[static_cast<size_t>(generation)]->promised.insert(name);
  }
  // For each generation, the vocabulary size of its head.
  const std::map<int64_t, int64_t>& vocab_of_generation() const { return vocab_of_generation_; }
  // The last created head with this vocab_size, by which heads are identified.
  DeviceHead* Find(int64_t vocab_size) const;

  // Set these before the first head is created.
  int chunks_in_flight = 1;
  int64_t chunk_rows = 4;
  bool asynchronous = false;
  Failures failures;

  int64_t chunks = 0;          // the number of chunks so far
  int64_t failed_results = 0;  // how many of them failed before their results
  int64_t broken = 0;          // how often a failure of the device left gradients or weights half-changed
  int64_t computed_rows = 0, computed_valid_rows = 0, added_rows = 0;
  std::map<kernels::Embedding, int64_t> rows_of_kind;  // the number of computed rows of each kind

 private:
  friend class DeviceHead;
  struct Job {
    DeviceHead* head;
    kernels::Chunk* chunk;
    kernels::ChunkCallbacks callbacks;
  };

  Scheduler* const scheduler_;
  const std::function<void(std::string)> violation_;
  std::vector<std::unique_ptr<Generation>> generations_;
  std::map<int64_t, int64_t> vocab_of_generation_;
  std::map<int64_t, DeviceHead*> heads_;
  std::deque<Job> jobs_;
  int in_flight_ = 0;
  int64_t steps_ = 0, zeros_ = 0, adds_ = 0;
  int64_t versions_ = 0;
  bool stopping_ = false;
};

}  // namespace lossd::engine::simulation

#endif  // LOSSD_TESTS_SERVER_ENGINE_SIMULATION_DEVICE_H_
