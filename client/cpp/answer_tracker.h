// SPDX-License-Identifier: Apache-2.0
// Which rows of a call have been answered; finds answers that do not belong to it.
//
// Thread-compatible. Errors are INTERNAL and say what the server sent.
#ifndef LOSSD_CLIENT_CPP_ANSWER_TRACKER_H_
#define LOSSD_CLIENT_CPP_ANSWER_TRACKER_H_

#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/loss_plan.h"
#include "lossd/v1/types.pb.h"

namespace lossd::client::internal {

class AnswerTracker {
 public:
  // Expects one answer for each of the slices, which are disjoint.
  static AnswerTracker Exactly(const std::vector<Rows>& slices);
  // Expects disjoint answers anywhere inside `range`: the server cuts it.
  static AnswerTracker Within(Rows range);

  // One of the slices is sent in parts.
  void Replace(Rows whole, const std::vector<Rows>& parts);

  // Notes an answer. An error if it is not expected (any more); then nothing changes.
  absl::Status Take(const v1::RowRange& rows);

  // Whether every expected slice was answered; always true for Within.
  bool Complete() const { return open_.empty(); }
  uint64_t answered_rows() const { return answered_rows_; }

 private:
  absl::Status TakeExactly(Rows rows);
  absl::Status TakeWithin(Rows rows);

  bool exactly_ = true;
  Rows range_;
  std::map<uint64_t, uint64_t> open_;      // begin -> end of slices without an answer
  std::map<uint64_t, uint64_t> answered_;  // begin -> end
  uint64_t answered_rows_ = 0;
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_ANSWER_TRACKER_H_
