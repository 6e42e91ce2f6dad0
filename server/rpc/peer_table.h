// SPDX-License-Identifier: Apache-2.0
// What each client has sent and taken since the server knows it, for ListStreams.
//
// Memory: an entry for each client. There are at most `most`, or as many as have open calls if these are
// more. When another client comes, those that have been idle longest go.
//
// Thread-safe.
#ifndef LOSSD_SERVER_RPC_PEER_TABLE_H_
#define LOSSD_SERVER_RPC_PEER_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace lossd::rpc {

// Of all ComputeLoss calls of a client.
struct PeerTotals {
  int64_t open_streams = 0;
  int64_t streams = 0;         // with those that have ended
  int64_t rows = 0;            // whose results the client has taken
  int64_t received_bytes = 0;  // hidden states that were queued
  int64_t sent_bytes = 0;      // gradients that the client has taken
  double device_wait_seconds = 0.0;
  absl::Time last_active;  // it last opened a call, sent or took something
};

class PeerTable {
 public:
  explicit PeerTable(size_t most) : most_(most) {}

  // The numbers of one client, as long as one of its calls is open.
  class Peer {
   public:
    void Queued(int64_t bytes, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
    void Computed(double device_wait_seconds) ABSL_LOCKS_EXCLUDED(mutex_);
    void Sent(int64_t rows, int64_t bytes, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);
    // The call that was opened has ended.
    void Close() ABSL_LOCKS_EXCLUDED(mutex_);
    PeerTotals totals() const ABSL_LOCKS_EXCLUDED(mutex_);

   private:
    friend class PeerTable;
    void Open(absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

    mutable absl::Mutex mutex_;
    PeerTotals totals_ ABSL_GUARDED_BY(mutex_);
  };

  // A call of `peer` begins; Peer::Close is called when it ends.
  std::shared_ptr<Peer> Open(const std::string& peer, absl::Time now) ABSL_LOCKS_EXCLUDED(mutex_);

  struct Entry {
    std::string peer;
    PeerTotals totals;
  };
  std::vector<Entry> List() const ABSL_LOCKS_EXCLUDED(mutex_);  // by name

 private:
  // The client that was idle longest; false if all have open calls.
  bool ForgetOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t most_;
  mutable absl::Mutex mutex_;  // taken before that of a Peer
  std::map<std::string, std::shared_ptr<Peer>> peers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace lossd::rpc

#endif  // LOSSD_SERVER_RPC_PEER_TABLE_H_
