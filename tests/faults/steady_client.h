// SPDX-License-Identifier: Apache-2.0
// A client that computes the same rows again and again, and knows from the first time what has to come of
// them: whatever befalls other clients of the server, nothing of that may be seen in its results.
//
// Thread-compatible.
#ifndef LOSSD_TESTS_FAULTS_STEADY_CLIENT_H_
#define LOSSD_TESTS_FAULTS_STEADY_CLIENT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/faults/gpu_rows.h"

namespace lossd::test {

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

#endif  // LOSSD_TESTS_FAULTS_STEADY_CLIENT_H_
