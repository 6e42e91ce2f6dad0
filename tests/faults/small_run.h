// SPDX-License-Identifier: Apache-2.0
// A training run that is small enough to be repeated a thousand times and hangs on every bit the server
// answers: its hidden states are the trainer's parameters and move against dL/dx, so an error of one bit
// stays for good. All of it follows from a seed, so two runs can be compared after any step. And a client
// that computes the same rows again and again (SteadyClient).
//
// All classes here are thread-compatible.
#ifndef LOSSD_TESTS_FAULTS_SMALL_RUN_H_
#define LOSSD_TESTS_FAULTS_SMALL_RUN_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/cuda_driver.h"
#include "tests/support/server_process.h"

namespace lossd::test {

// ---- Rows on a GPU of the machine, which is played (tests/client/cpp/fake_cuda.h) ----
// Trainers of these tests have them there with LOSSD_TRANSPORT=cuda_ipc. It is the first GPU, or that of
// LOSSD_TEST_GPU.

inline bool RowsAreOnGpu() {
  const char* const transport = std::getenv("LOSSD_TRANSPORT");
  return transport != nullptr && absl::string_view(transport) == "cuda_ipc";
}

inline int GpuOfRows() {
  const char* const gpu = std::getenv("LOSSD_TEST_GPU");
  return gpu == nullptr ? 0 : std::atoi(gpu);
}

// A copy of numbers.
class GpuRows {
 public:
  explicit GpuRows(const std::vector<float>& values)
      : driver_(client::internal::CudaDriver::Get().value()),
        bytes_(values.size() * sizeof(float)),
        data_(driver_->Allocate(bytes_, gpu_).value()) {
    Write(values).IgnoreError();  // a copy that fails is seen by its results
  }
  ~GpuRows() { driver_->Free(data_, gpu_); }
  GpuRows(const GpuRows&) = delete;
  GpuRows& operator=(const GpuRows&) = delete;

  void* data() const { return data_; }
  // `values`: as many as there are.
  absl::Status Write(const std::vector<float>& values) const {
    return driver_->Copy(data_, values.data(), bytes_, gpu_);
  }
  absl::Status Read(std::vector<float>* values) const {
    return driver_->Copy(values->data(), data_, bytes_, gpu_);
  }

 private:
  client::internal::CudaDriver* const driver_;
  const int gpu_ = GpuOfRows();
  const uint64_t bytes_;
  uint8_t* const data_;
};

struct RunShape {
  std::string head = "head";
  uint64_t hidden_size = 32;       // D
  uint64_t vocab_size = 257;       // V
  uint64_t microbatches = 3;       // a step
  uint64_t microbatch_rows = 160;  // N
  uint64_t seed = 0;
};

// The head of such a run: bias, RMSNorm and Adam state, with weights of the run's seed.
v1::CreateHeadRequest HeadOf(const RunShape& shape);

// How a microbatch travels, which makes no difference to what comes of it.
struct Travel {
  int streams = 2;
  uint64_t slice_bytes = 32 * 32 * sizeof(float);  // 32 rows
};

// Whether the head's weight is also the trainer's embedding (LOSSD_TEST_TIED=1): what is sent of a row is its
// hidden state plus the weight's row of its target, and the gradient of that row comes back in a microbatch
// of its own.
inline bool IsTied() {
  const char* const tied = std::getenv("LOSSD_TEST_TIED");
  return tied != nullptr && absl::string_view(tied) == "1";
}

// A microbatch under way and its results.
struct SentMicrobatch {
  client::Client* client = nullptr;
  Travel travel;
  std::vector<float> input;                                 // [N, D], of a tied head: what was sent
  absl::Status embedded;                                    // whether the rows of the embedding came
  std::vector<float> row_loss;                              // [N]
  std::vector<float> grad_hidden;                           // [N, D]
  std::unique_ptr<GpuRows> hidden_on_gpu, gradient_on_gpu;  // null: rows are on the host
  client::PendingLoss pending;                              // ends before the memory does

  absl::StatusOr<client::LossResult> Wait() {
    if (embedded.ok()) return pending.Wait();
    return embedded;
  }
};

class SmallTrainer {
 public:
  explicit SmallTrainer(const RunShape& shape);

  uint64_t step() const { return step_; }  // the one to be trained next
  const RunShape& shape() const { return shape_; }

  // Starts microbatch `id` of the step. The trainer must not change before it is done.
  std::unique_ptr<SentMicrobatch> Send(client::Client& client, uint64_t id, const Travel& travel) const;
  // Waits for a microbatch and keeps its results; INTERNAL if they differ in a bit from earlier ones of the
  // step. Of a tied head the last one of a step adds the gradients of the embedding of all.
  absl::Status Receive(uint64_t id, SentMicrobatch& sent);
  // Whether the microbatch is done as far as the trainer knows.
  bool received(uint64_t id) const { return received_[id]; }
  // The server has lost the step: all its microbatches are to be sent again.
  void Repeat();

  // Of the step under way, or of an earlier one.
  v1::ApplyStepRequest StepRequest(uint64_t step) const;
  v1::ApplyStepRequest StepRequest() const { return StepRequest(step_); }
  // Moves the hidden states. To be called when all microbatches were received; then the step is the next one.
  void Advance();

  // The trainer's checkpoint.
  std::string Encode() const;
  void Decode(absl::string_view state);

  // [N, D] each; and the losses of the last step, [N] each.
  const std::vector<std::vector<float>>& hidden() const { return hidden_; }
  const std::vector<std::vector<float>>& last_losses() const { return last_losses_; }

 private:
  std::vector<int32_t> Targets(uint64_t id) const;
  // Microbatches on the wire: with those of the embedding's gradients.
  uint64_t wire_microbatches() const { return (tied_ ? 2 : 1) * shape_.microbatches; }
  // Fills `input`.
  absl::Status Embed(uint64_t id, SentMicrobatch* sent) const;
  absl::Status AddRowGradients(const SentMicrobatch& last) const;

  RunShape shape_;
  bool tied_ = IsTied();
  uint64_t step_ = 0;
  std::vector<std::vector<float>> hidden_;
  std::vector<std::vector<float>> last_losses_;
  // The step under way, by microbatch. Results stay for comparison when they are to be received again.
  std::vector<bool> received_;
  std::vector<std::vector<float>> losses_;
  std::vector<std::vector<float>> gradients_;
};

// Sends all microbatches not received yet at once, receives them, applies the step and advances. After an
// error nothing is under way, and calling it again goes on.
absl::Status TrainStep(SmallTrainer& trainer, client::Client& client, const Travel& travel = {});

// Everything that training has brought about.
struct RunImage {
  uint64_t step = 0;  // the head's open step
  std::map<std::string, std::vector<float>>
      tensors;  // the head's values and moments; the trainer's parameters
};
absl::StatusOr<RunImage> TakeImage(const SmallTrainer& trainer, client::Client& client,
                                   const RunShape& shape);
// Empty if both are the same, bit for bit; else says where they differ first.
std::string Difference(const RunImage& got, const RunImage& want);

// The run as it should be, on a server of its own without disturbances.
class UndisturbedRun {
 public:
  UndisturbedRun(const RunShape& shape, const std::string& lossd, const std::vector<std::string>& flags);
  // The image after so many steps. Those of the last steps asked for are kept.
  const RunImage& After(uint64_t steps);

 private:
  const RunShape shape_;
  ServerProcess server_;
  std::unique_ptr<client::Client> client_;
  SmallTrainer trainer_;
  std::map<uint64_t, RunImage> images_;  // by steps
};

// A client that computes the same rows again and again, and knows from the first time what has to come of
// them: whatever befalls other clients of the server, nothing of that may be seen in its results.
class SteadyClient {
 public:
  static constexpr uint64_t kHidden = 32, kClasses = 257;
  static constexpr uint64_t kSliceRows = 32;

  // The head that all of them use.
  static v1::CreateHeadRequest Head() {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("steady");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_kaiming_uniform()->set_seed(3);
    return request;
  }

  // One microbatch of each of these numbers of rows. `region_bytes` as ClientOptions::shared_memory_bytes.
  static absl::StatusOr<std::unique_ptr<SteadyClient>> Connect(const std::string& target,
                                                               const std::vector<uint64_t>& rows,
                                                               std::optional<int64_t> region_bytes) {
    auto client =
        client::Client::Connect({.target = target, .channels = 1, .shared_memory_bytes = region_bytes});
    if (!client.ok()) return client.status();
    return std::unique_ptr<SteadyClient>(new SteadyClient(*std::move(client), rows));
  }

  // All microbatches at once. UNKNOWN if results are others than before, or if rows do not go as they should.
  absl::Status Compute() {
    return ComputeWhile([] {});
  }
  // The same; `meanwhile` runs while they are under way.
  template <typename Function>
  absl::Status ComputeWhile(Function meanwhile) {
    for (Work& work : works_) {
      if (absl::Status status = Start(work); !status.ok()) return status;
    }
    meanwhile();
    absl::Status status;
    for (Work& work : works_) status.Update(work.pending.Wait().status());
    for (Work& work : works_) {
      if (status.ok()) status = Check(work);
    }
    return status;
  }

 private:
  struct Work {
    std::vector<float> hidden;
    std::vector<int32_t> targets;
    std::vector<float> gradient, wanted;
    std::unique_ptr<GpuRows> hidden_on_gpu, gradient_on_gpu;
    client::PendingLoss pending;  // ends before the memory does
  };

  SteadyClient(std::unique_ptr<client::Client> client, const std::vector<uint64_t>& rows)
      : client_(std::move(client)), works_(rows.size()) {
    std::mt19937_64 random(11);
    for (size_t i = 0; i < rows.size(); ++i) {
      Work& work = works_[i];
      for (uint64_t k = 0; k < rows[i] * kHidden; ++k)
        work.hidden.push_back(std::normal_distribution<float>()(random));
      for (uint64_t k = 0; k < rows[i]; ++k)
        work.targets.push_back(static_cast<int32_t>(random() % kClasses));
      work.gradient.resize(work.hidden.size());
      if (!RowsAreOnGpu()) continue;
      work.hidden_on_gpu = std::make_unique<GpuRows>(work.hidden);
      work.gradient_on_gpu = std::make_unique<GpuRows>(work.gradient);
    }
  }

  absl::Status Start(Work& work) {
    const bool on_gpu = work.hidden_on_gpu != nullptr;
    std::fill(work.gradient.begin(), work.gradient.end(), NAN);  // each is to be overwritten
    if (on_gpu) {
      if (absl::Status written = work.gradient_on_gpu->Write(work.gradient); !written.ok()) return written;
    }
    client::Microbatch microbatch;
    microbatch.head = "steady";
    microbatch.hidden_size = kHidden;
    microbatch.hidden_dtype = v1::DTYPE_FP32;
    microbatch.memory = on_gpu ? client::Memory::kDevice : client::Memory::kHost;
    microbatch.hidden = on_gpu ? work.hidden_on_gpu->data() : work.hidden.data();
    microbatch.targets = work.targets;
    client::LossOutputs outputs;
    outputs.grad_hidden = on_gpu ? work.gradient_on_gpu->data() : work.gradient.data();
    client::ComputeOptions options;
    options.streams = 1;
    options.slice_bytes = kSliceRows * kHidden * sizeof(float);
    work.pending = client_->ComputeLossAsync(microbatch, outputs, options);
    return absl::OkStatus();
  }

  absl::Status Check(Work& work) const {
    const client::TransportChoice choice = client_->transport();
    const std::string& wanted = client_->options().transport;
    const std::string& taken = work.hidden_on_gpu != nullptr ? choice.device.transport : choice.transport;
    if (taken != (wanted == "auto" ? "shared_memory" : wanted))
      return absl::UnknownError(absl::StrCat("rows go by ", taken, ": ", choice.reason));
    if (work.gradient_on_gpu != nullptr) {
      if (absl::Status read = work.gradient_on_gpu->Read(&work.gradient); !read.ok()) return read;
    }
    if (work.wanted.empty()) work.wanted = work.gradient;
    for (size_t i = 0; i < work.gradient.size(); ++i) {
      if (!(std::abs(work.gradient[i] - work.wanted[i]) <= 1e-6f))
        return absl::UnknownError(
            absl::StrCat("gradient ", i, " is ", work.gradient[i], ", not ", work.wanted[i]));
    }
    return absl::OkStatus();
  }

  const std::unique_ptr<client::Client> client_;
  std::vector<Work> works_;  // end before the client
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_FAULTS_SMALL_RUN_H_
