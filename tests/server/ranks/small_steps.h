// SPDX-License-Identifier: Apache-2.0
// A training in which every step ends with a checkpoint, so that it can continue after any restart, and the
// result of the same training without disturbances.
#ifndef LOSSD_TESTS_SERVER_RANKS_SMALL_STEPS_H_
#define LOSSD_TESTS_SERVER_RANKS_SMALL_STEPS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "tests/server/service/small_training.h"
#include "tests/support/effort.h"
#include "tests/support/server_process.h"

namespace lossd::app::testing {

inline constexpr uint64_t kForEver = UINT64_MAX;

inline std::unique_ptr<client::Client> ConnectOnce(const std::string& target) {
  return client::Client::Connect({.target = target, .retry = {.max_attempts = 1}}).value();
}

// Accumulates all microbatches of a step.
inline absl::Status Accumulate(client::Client& client, const std::vector<SmallRows>& data, uint64_t step) {
  std::vector<std::vector<float>> grads(data.size());
  std::vector<client::PendingLoss> pending;
  for (size_t i = 0; i < data.size(); ++i) {
    grads[i].resize(data[i].hidden.size());
    client::ComputeOptions compute;
    compute.accumulate_gradients = true;
    compute.max_attempts = 1;
    pending.push_back(client.ComputeLossAsync(SmallMicrobatch(data[i], step, i),
                                              {.grad_hidden = grads[i].data()}, compute));
  }
  absl::Status status;
  for (client::PendingLoss& loss : pending) status.Update(loss.Wait().status());
  return status;
}

// Does one step and saves a checkpoint of the result.
inline absl::Status DoStep(client::Client& client, const std::vector<SmallRows>& data, uint64_t step) {
  absl::Status status = Accumulate(client, data, step);
  if (status.ok()) status = client.ApplyStep(AdamStep(step, data.size())).status();
  if (status.ok()) status = client.SaveCheckpoint("head").status();
  return status;
}

// Does steps until `last` steps are done; there may be none left. Returns the error of the first call that
// fails.
inline absl::Status TrainOn(const std::string& target, const std::vector<SmallRows>& data, uint64_t last) {
  const auto connected = client::Client::Connect({.target = target, .retry = {.max_attempts = 1}});
  if (!connected.ok()) return connected.status();
  client::Client& client = **connected;
  auto head = client.DescribeHead("head");
  if (absl::IsNotFound(head.status())) {  // killed before its first checkpoint
    if (absl::Status status = client.CreateHead(SmallHead()).status(); !status.ok()) return status;
    if (absl::Status status = client.SaveCheckpoint("head").status(); !status.ok()) return status;
    head = client.DescribeHead("head");
  }
  if (!head.ok()) return head.status();
  for (uint64_t step = head->state().step(); step < last; ++step) {
    if (absl::Status status = DoStep(client, data, step); !status.ok()) return status;
  }
  return absl::OkStatus();
}

inline std::vector<SmallRows> SomeData(std::mt19937_64& rng) {
  std::vector<SmallRows> data;
  for (const size_t rows : {1400, 900, 700, 90}) data.push_back(MakeSmallRows(rows, rng));
  return data;
}

inline std::vector<std::vector<float>> Undisturbed(const std::string& program, int ranks,
                                                   const std::vector<SmallRows>& data, uint64_t steps,
                                                   const std::string& split = "rows") {
  test::RankServer server(
      program, {.ranks = ranks, .flags = {"--deterministic", "--keep_checkpoints=2", "--split=" + split}});
  EXPECT_TRUE(TrainOn(server.target(), data, steps).ok());
  return Tensors(*ConnectOnce(server.target()));
}

// A quarter of the attempts of the nightly suite, or LOSSD_RANK_FAULTS attempts.
inline int Times(int nightly) {
  const char* const times = std::getenv("LOSSD_RANK_FAULTS");
  return times == nullptr ? static_cast<int>(test::Attempts((nightly + 3) / 4, nightly)) : std::atoi(times);
}

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_RANKS_SMALL_STEPS_H_
