// SPDX-License-Identifier: Apache-2.0
// AttacksTest: a lossd process under attack, and a well-behaved client of it.
#ifndef LOSSD_TESTS_SERVER_LIMITS_ATTACKS_FIXTURE_H_
#define LOSSD_TESTS_SERVER_LIMITS_ATTACKS_FIXTURE_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/server/service/service_client.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing {

using test::RawHttp2;

inline constexpr int64_t kMebibyte = int64_t{1} << 20;
// Memory that the server has planned (by the flags below and in server_process.h) but does not use right
// after its start.
inline constexpr int64_t kLedger = 32 * kMebibyte;
inline constexpr int64_t kTransport = 64 * kMebibyte;
inline constexpr int64_t kStaging = 4 * kMebibyte;
// Memory that is not planned: states of calls and connections, stacks, and what the allocator keeps.
inline constexpr int64_t kOverhead = 128 * kMebibyte;

inline constexpr int64_t kHidden = 16;
inline constexpr int64_t kRows = 64;

class AttacksTest : public ::testing::Test {
 protected:
  // Timeouts that are longer than any test, so that only the other limits protect the server, unless a test
  // sets its own.
  static constexpr const char* kPatient[] = {"--open_timeout=1h", "--idle_timeout=1h", "--turn_timeout=1h",
                                             "--send_timeout=1h"};

  void Start(std::vector<std::string> flags = {kPatient, kPatient + 4}, int64_t transport = kTransport) {
    flags.push_back(absl::StrCat("--ledger_bytes=", kLedger));
    flags.push_back(absl::StrCat("--transport_bytes=", transport));
    server_ = std::make_unique<test::ServerProcess>(LOSSD_BINARY, std::move(flags));
    client_ = TestClient::Connect(server_->target());
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("head");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(100);
    ASSERT_TRUE(client_->CreateHead(request).ok());
    Train();
    before_ = Resident();
  }

  static v1::OpenMicrobatch Open(uint64_t id, int64_t rows, uint64_t step) {
    v1::OpenMicrobatch open;
    open.set_head("head");
    open.set_step(step);
    open.set_microbatch_id(id);
    open.set_microbatch_rows(static_cast<uint64_t>(rows));
    open.mutable_rows()->set_end(static_cast<uint64_t>(rows));
    open.set_hidden_dtype(v1::DTYPE_FP32);
    open.set_reduction(v1::REDUCTION_SUM);
    open.set_want_grad_hidden(true);
    open.set_accumulate_gradients(true);
    open.mutable_targets()->Resize(static_cast<int>(rows), 1);
    return open;
  }
  static std::string OpenMessage(uint64_t id, int64_t rows, uint64_t step) {
    v1::ComputeLossRequest request;
    *request.mutable_open() = Open(id, rows, step);
    return request.SerializeAsString();
  }

  // A whole step, and a save of it, by the well-behaved client.
  void Train() {
    for (uint64_t id = 0; id < 3; ++id) {
      LossAnswers answers;
      const absl::Status status = Repeat([&] {
        const auto stream = client_->OpenLoss();
        stream->SendOpen(Open(first_id_ + id, kRows, step_));
        stream->SendSlice(0, kRows, Bytes(std::vector<float>(kRows * kHidden, 0.5f)));
        answers = stream->Finish();
        return answers.status;
      });
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_EQ(answers.summary->accumulated_rows(), static_cast<uint64_t>(kRows));
    }
    v1::ApplyStepRequest request;
    request.set_head("head");
    request.set_step(step_);
    request.mutable_optimizer()->mutable_sgd()->set_learning_rate(0.1f);
    for (uint64_t id = 0; id < 3; ++id) request.add_expected_microbatches(first_id_ + id);
    const absl::Status applied = Repeat([&] { return client_->ApplyStep(request).status(); });
    ASSERT_TRUE(applied.ok()) << applied;
    ++step_;
    const absl::Status saved =
        Repeat([&] { return client_->SaveCheckpoint("head", absl::StrCat("step", step_)).status(); });
    ASSERT_TRUE(saved.ok()) << saved;
  }
  // Repeats a call as clients do. When memory is short, gRPC's memory quota makes a server close idle
  // connections, and a call that begins at that moment fails ("Broken pipe").
  static absl::Status Repeat(const std::function<absl::Status()>& call) {
    absl::Status status = call();
    for (int i = 0; i < 2 && absl::IsUnavailable(status); ++i) status = call();
    return status;
  }

  int64_t Resident() const {
    std::ifstream file(absl::StrCat("/proc/", server_->pid(), "/statm"));
    int64_t pages = 0, resident = 0;
    file >> pages >> resident;
    return resident * sysconf(_SC_PAGESIZE);
  }
  // Checks that memory has grown by at most `planned` and kOverhead. `planned` may be less than everything
  // that is planned.
  void ExpectBounded(int64_t planned = kLedger + kTransport + kStaging) {
    const int64_t grown = Resident() - before_;
    RecordProperty("grown_mib", static_cast<int>(grown / kMebibyte));
    EXPECT_LE(grown, planned + kOverhead);
    EXPECT_TRUE(server_->Running());
  }
  // Calls Pump of all connections in turn for this time.
  static void Pump(std::vector<std::unique_ptr<RawHttp2>>& connections, absl::Duration time) {
    const absl::Time end = absl::Now() + time;
    while (absl::Now() < end) {
      for (const auto& connection : connections) connection->Pump(absl::Milliseconds(5));
    }
  }

  std::unique_ptr<test::ServerProcess> server_;
  std::unique_ptr<TestClient> client_;
  uint64_t first_id_ = 1'000'000;  // of the microbatches that Train sends
  uint64_t step_ = 0;
  int64_t before_ = 0;
};

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_LIMITS_ATTACKS_FIXTURE_H_
