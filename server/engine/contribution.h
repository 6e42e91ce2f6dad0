// SPDX-License-Identifier: Apache-2.0
// A gradient that another stage accumulated for a parameter it shares with the head (tied embeddings): what a
// caller hands to the engine to have it added, and what is known of its rows without a device.
#ifndef LOSSD_SERVER_ENGINE_CONTRIBUTION_H_
#define LOSSD_SERVER_ENGINE_CONTRIBUTION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/dtype.h"
#include "kernels/head_config.h"
#include "server/engine/stream.h"
#include "server/engine/versions.h"

namespace lossd::engine {

// Opens (part of) a contribution. Field names equal those of lossd.v1.OpenGradient, and errors name them so.
struct ContributionSpec {
  std::string head;
  uint64_t step = 0;
  std::optional<uint64_t> generation;  // HeadState::generation that it is meant for
  std::string run;                     // of the program that trains, for people
  uint64_t contribution_id = 0;
  kernels::Param param = kernels::Param::kWeight;
  std::optional<RowRange> contribution_rows;  // absent: all rows of the parameter
  std::optional<RowRange> rows;               // carried by this call; absent: contribution_rows
  kernels::DType dtype = kernels::DType::kFloat32;
  float scale = 1.0f;
};

// What all calls of one contribution must agree on.
struct ContributionTerms {
  kernels::Param param = kernels::Param::kWeight;
  RowRange rows;  // of the whole contribution
  kernels::DType dtype = kernels::DType::kFloat32;
  float scale = 1.0f;
  friend bool operator==(const ContributionTerms&, const ContributionTerms&) = default;
};

class HeadSession;

// Counts one call as long as it lives. Thread-safe.
class CountedCall {
 public:
  using Counter = std::atomic<int64_t>;

  explicit CountedCall(std::shared_ptr<Counter> counter) : counter_(std::move(counter)) { ++*counter_; }
  ~CountedCall() { --*counter_; }
  CountedCall(const CountedCall&) = delete;
  CountedCall& operator=(const CountedCall&) = delete;

 private:
  const std::shared_ptr<Counter> counter_;
};

// An open call; Engine::AddRows takes its rows.
struct Contribution {
  std::shared_ptr<HeadSession> session;  // of the head, which may have been deleted since
  HeadState state;                       // when it was opened
  Binding binding;                       // all rows of a call are added to one generation
  uint64_t id = 0;
  ContributionTerms terms;
  RowRange rows;     // carried by this call
  int64_t cols = 1;  // elements of a row
  std::string run;   // ContributionSpec::run
  // Counts as an open call of the head until all copies are gone.
  std::shared_ptr<const CountedCall> counted;

  int64_t row_bytes() const { return cols * static_cast<int64_t>(kernels::SizeOf(terms.dtype)); }
};

// What became of the rows of one message.
struct AddedRows {
  int64_t rows = 0;  // that had not been added before
  HeadState state;   // when they were added
};

// OUT_OF_RANGE naming the row and column of the first element that is not finite, or whose product with the
// scale is not finite in fp32. `values` are `rows` of the
// contribution.
absl::Status CheckFinite(const Contribution& contribution, RowRange rows, absl::Span<const uint8_t> values);

// A 64-bit checksum of each row of `values`, whose rows have `row_bytes` > 0 bytes; never 0.
std::vector<uint64_t> RowChecksums(absl::Span<const uint8_t> values, int64_t row_bytes);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_CONTRIBUTION_H_
