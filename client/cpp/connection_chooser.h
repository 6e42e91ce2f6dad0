// SPDX-License-Identifier: Apache-2.0
// How many connections a client takes that chooses by itself. It begins with one, which is all that small
// jobs ever have. Once payload keeps the present ones busy, it tries one more for a while, and stays with it
// if that moved more; else it goes back, and tries again much later.
//
// Both clients do this in the same way: client/python/src/lossd/_connection_chooser.py;
// tests/client/golden/connections.json holds both to it. Times come from the caller.
//
// Thread-compatible.
#ifndef LOSSD_CLIENT_CPP_CONNECTION_CHOOSER_H_
#define LOSSD_CLIENT_CPP_CONNECTION_CHOOSER_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lossd::client::internal {

class ConnectionChooser {
 public:
  static constexpr int kMost = 8;

  enum class Advice {
    kStay,
    kAdd,   // open one more connection, then call Added or Refused
    kDrop,  // the last connection is not used any more
  };

  // Those that streams are spread over.
  int count() const { return count_; }

  // A stream begins.
  void Begin(absl::Time now);
  // A stream has ended. `moved`: the bytes of payload that all streams have ever moved in messages, both
  // ways.
  Advice End(uint64_t moved, absl::Time now);

  // The connection that was advised stands; count() is one more.
  void Added(uint64_t moved);
  // It does not, for this reason.
  void Refused(absl::string_view why, uint64_t moved);

  // Why there are so many, for people.
  const std::string& reason() const { return reason_; }

 private:
  struct Round {
    uint64_t moved_before = 0;
    absl::Duration busy;          // with at least one stream under way
    absl::Duration streams_busy;  // summed over streams
  };

  void Advance(absl::Time now);
  // What follows from a round in which so many bytes were moved a second.
  Advice Decide(double rate);
  void Rest();

  int count_ = 1;
  bool opening_ = false;  // another one is being opened
  bool trying_ = false;   // the last one is on trial
  double before_ = 0;     // bytes per second without it
  int rest_ = 0;          // rounds before the next trial
  int failures_ = 0;      // trials in a row
  int under_way_ = 0;     // streams
  absl::Time last_;       // when their number changed
  Round round_;
  std::string reason_ = "little was sent in messages so far";
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_CONNECTION_CHOOSER_H_
