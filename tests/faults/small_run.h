// SPDX-License-Identifier: Apache-2.0
// SmallTrainer: a training run that is small enough to be repeated a thousand times, and whose result depends
// on every bit that the server answers. Its hidden states are the trainer's parameters and move against
// dL/dx, so an error of one bit is never lost. Everything follows from a seed, so two runs can be compared
// after any step. SteadyClient is a client that computes the same rows again and again.
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

// ---- Rows on a simulated GPU (tests/client/cpp/fake_cuda.h) ----
// With LOSSD_TRANSPORT=cuda_ipc, the rows of trainers are on the first GPU, or on the GPU that LOSSD_TEST_GPU
// names.

inline bool RowsAreOnGpu() {
  const char* const transport = std::getenv("LOSSD_TRANSPORT");
  return transport != nullptr && absl::string_view(transport) == "cuda_ipc";
}

inline int GpuOfRows() {
  const char* const gpu = std::getenv("LOSSD_TEST_GPU");
  return gpu == nullptr ? 0 : std::atoi(gpu);
}

// A copy of floats in memory of the GPU.
class GpuRows {
 public:
  explicit GpuRows(const std::vector<float>& values)
      : driver_(client::internal::CudaDriver::Get().value()),
        bytes_(values.size() * sizeof(float)),
        data_(driver_->Allocate(bytes_, gpu_).value()) {
    Write(values).IgnoreError();  // a test notices a failed copy by its results
  }
  ~GpuRows() { driver_->Free(data_, gpu_); }
  GpuRows(const GpuRows&) = delete;
  GpuRows& operator=(const GpuRows&) = delete;

  void* data() const { return data_; }
  // `values` must have as many elements as the copy.
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

// The head of such a run: it has bias, RMSNorm and Adam state, and its weights follow from the run's seed.
v1::CreateHeadRequest HeadOf(const RunShape& shape);

// How a microbatch is sent. The results do not depend on it.
struct Travel {
  int streams = 2;
  uint64_t slice_bytes = 32 * 32 * sizeof(float);  // 32 rows
};

// Whether the head's weight is also the trainer's embedding (LOSSD_TEST_TIED=1). Then the row that is sent is
// the hidden state plus the weight's row for its target, and the gradient of that row is sent back in a
// microbatch of its own.
inline bool IsTied() {
  const char* const tied = std::getenv("LOSSD_TEST_TIED");
  return tied != nullptr && absl::string_view(tied) == "1";
}

// A microbatch in flight, and its results.
struct SentMicrobatch {
  client::Client* client = nullptr;
  Travel travel;
  std::vector<float> input;        // [N, D], only of a tied head: the rows that were sent
  absl::Status embedded;           // the status of the call that got the rows of the embedding
  std::vector<float> row_loss;     // [N]
  std::vector<float> grad_hidden;  // [N, D]
  std::unique_ptr<GpuRows> hidden_on_gpu, gradient_on_gpu;  // null: rows are on the host
  client::PendingLoss pending;                              // destroyed before the memory that it uses

  absl::StatusOr<client::LossResult> Wait() {
    if (embedded.ok()) return pending.Wait();
    return embedded;
  }
};

class SmallTrainer {
 public:
  explicit SmallTrainer(const RunShape& shape);

  uint64_t step() const { return step_; }  // the step that is trained next
  const RunShape& shape() const { return shape_; }

  // Starts microbatch `id` of the step. The trainer must not change before it is done.
  std::unique_ptr<SentMicrobatch> Send(client::Client& client, uint64_t id, const Travel& travel) const;
  // Waits for a microbatch and keeps its results. INTERNAL if they differ in any bit from earlier results of
  // the step. With a tied head, the last microbatch of a step adds the gradients of the embedding for all of
  // them.
  absl::Status Receive(uint64_t id, SentMicrobatch& sent);
  // Whether the trainer has received the results of the microbatch.
  bool received(uint64_t id) const { return received_[id]; }
  // Call it when the server has lost the step: all its microbatches have to be sent again.
  void Repeat();

  // The request that applies the present step, or an earlier one.
  v1::ApplyStepRequest StepRequest(uint64_t step) const;
  v1::ApplyStepRequest StepRequest() const { return StepRequest(step_); }
  // Moves the hidden states, and begins the next step. Call it when all microbatches were received.
  void Advance();

  // The trainer's checkpoint.
  std::string Encode() const;
  void Decode(absl::string_view state);

  // hidden() has [N, D] for each microbatch; last_losses() has the losses of the last step, [N] each.
  const std::vector<std::vector<float>>& hidden() const { return hidden_; }
  const std::vector<std::vector<float>>& last_losses() const { return last_losses_; }

 private:
  std::vector<int32_t> Targets(uint64_t id) const;
  // The number of microbatches that are sent, with those of the embedding's gradients.
  uint64_t wire_microbatches() const { return (tied_ ? 2 : 1) * shape_.microbatches; }
  // Fills sent->input.
  absl::Status Embed(uint64_t id, SentMicrobatch* sent) const;
  absl::Status AddRowGradients(const SentMicrobatch& last) const;

  RunShape shape_;
  bool tied_ = IsTied();
  uint64_t step_ = 0;
  std::vector<std::vector<float>> hidden_;
  std::vector<std::vector<float>> last_losses_;
  // The present step, by microbatch. Results stay, to be compared if they are received again.
  std::vector<bool> received_;
  std::vector<std::vector<float>> losses_;
  std::vector<std::vector<float>> gradients_;
};

// Sends all microbatches at once that were not received yet, receives them, applies the step and advances.
// After an error nothing is in flight, and another call continues.
absl::Status TrainStep(SmallTrainer& trainer, client::Client& client, const Travel& travel = {});

// The state that a training has led to.
struct RunImage {
  uint64_t step = 0;  // the head's open step
  std::map<std::string, std::vector<float>>
      tensors;  // the head's values and moments; the trainer's parameters
};
absl::StatusOr<RunImage> TakeImage(const SmallTrainer& trainer, client::Client& client,
                                   const RunShape& shape);
// Empty if both images are equal, bit for bit; otherwise says where they first differ.
std::string Difference(const RunImage& got, const RunImage& want);

// The same run on a server of its own without disturbances.
class UndisturbedRun {
 public:
  UndisturbedRun(const RunShape& shape, const std::string& lossd, const std::vector<std::string>& flags);
  // The image after this number of steps. Only the images of the last steps that were asked for are kept.
  const RunImage& After(uint64_t steps);

 private:
  const RunShape shape_;
  ServerProcess server_;
  std::unique_ptr<client::Client> client_;
  SmallTrainer trainer_;
  std::map<uint64_t, RunImage> images_;  // by number of steps
};

// A client that computes the same rows again and again, and remembers the results of the first time. What
// happens to other clients of the server must not change its results.
class SteadyClient {
 public:
  static constexpr uint64_t kHidden = 32, kClasses = 257;
  static constexpr uint64_t kSliceRows = 32;

  // The head that all SteadyClients use.
  static v1::CreateHeadRequest Head() {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("steady");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_kaiming_uniform()->set_seed(3);
    return request;
  }

  // `rows`: the number of rows of each microbatch. `region_bytes`: see ClientOptions::shared_memory_bytes.
  static absl::StatusOr<std::unique_ptr<SteadyClient>> Connect(const std::string& target,
                                                               const std::vector<uint64_t>& rows,
                                                               std::optional<int64_t> region_bytes) {
    auto client =
        client::Client::Connect({.target = target, .channels = 1, .shared_memory_bytes = region_bytes});
    if (!client.ok()) return client.status();
    return std::unique_ptr<SteadyClient>(new SteadyClient(*std::move(client), rows));
  }

  // Computes all microbatches at once. UNKNOWN if results differ from the first ones, or if rows are not sent
  // in the expected way.
  absl::Status Compute() {
    return ComputeWhile([] {});
  }
  // The same; calls `meanwhile` while the microbatches are in flight.
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
    client::PendingLoss pending;  // destroyed before the memory that it uses
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
    std::fill(work.gradient.begin(), work.gradient.end(), NAN);  // every element must be overwritten
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
  std::vector<Work> works_;  // destroyed before the client
};

}  // namespace lossd::test

#endif  // LOSSD_TESTS_FAULTS_SMALL_RUN_H_
