// SPDX-License-Identifier: Apache-2.0
// Rows in memory that the leader shares with the workers of its host: staging memory of the group is a memfd
// whose descriptor goes to them over a Unix socket, and slices name places in it instead of bringing hidden
// states. What cannot be shared with a worker travels in messages, as to the workers of other hosts.
//
// The socket is an abstract one with a random name. It serves processes of the leader's user and root
// (SO_PEERCRED) that know the token of their rank, which goes over the ranks' own connection.
//
// Thread-safe. One thread.
#ifndef LOSSD_SERVER_RANKS_SHARED_ROWS_H_
#define LOSSD_SERVER_RANKS_SHARED_ROWS_H_

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/group/group_backend.h"
#include "kernels/heartbeat.h"
#include "proto/wire/region_packets.h"
#include "server/connections/entrance.h"
#include "server/ranks/row_regions.h"

namespace lossd::ranks {

class SharedRows final : public kernels::GroupStaging {
 public:
  // How long memory waits for the workers to map it. Then they get rows in messages until they have.
  static constexpr absl::Duration kMapTimeout = absl::Seconds(10);
  // For a process that has connected, to say its token.
  static constexpr absl::Duration kTokenTimeout = absl::Seconds(10);

  // For workers 1 to `ranks` - 1. UNAVAILABLE if there can be no socket.
  static absl::StatusOr<std::unique_ptr<SharedRows>> Listen(int ranks);
  ~SharedRows() override;
  SharedRows(const SharedRows&) = delete;
  SharedRows& operator=(const SharedRows&) = delete;

  // What a worker connects by: "@..." and 32 random bytes, which admit one connection.
  const std::string& socket() const { return name_; }
  const std::string& TokenOf(int rank) const { return tokens_[static_cast<size_t>(rank)]; }

  RowRegions& regions() { return regions_; }

  // How long ago the thread last looked for something to do.
  absl::Duration Silence() const { return beat_.Silence(); }

  // Memory of the result is shared with all workers that are here when this returns. It ends before this.
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> Allocate(kernels::Backend* first,
                                                                   int64_t bytes) override;
  // Shared with the workers soon, if the options have a descriptor. Likewise.
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> Adopt(
      kernels::Backend* first, absl::Span<uint8_t> memory, const kernels::AdoptOptions& options) override;

 private:
  struct Session {
    wire::OwnedDescriptor socket;
    int rank = 0;  // 0: it has not said its token
    absl::Time deadline;
  };

  SharedRows(int ranks, std::string name, std::vector<std::string> tokens,
             std::vector<connections::ListeningSocket> listeners);
  absl::StatusOr<std::unique_ptr<kernels::StagingMemory>> AllocateShared(kernels::Backend* first,
                                                                         int64_t bytes);
  // ---- Of the thread ----
  void Run();
  void Accept(int listener);
  // Whether the session goes on.
  bool Read(Session* session);
  bool Enter(Session* session, const v1::RowsFromWorker& message);
  bool Write(const Session& session);
  int Patience() const;  // for poll

  const std::string name_;
  const std::vector<std::string> tokens_;  // by rank
  connections::Entrance entrance_;
  const wire::OwnedDescriptor wake_;
  const wire::OwnedDescriptor stop_;
  RowRegions regions_;
  std::list<Session> sessions_;  // of the thread
  kernels::Heartbeat beat_;
  std::thread thread_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_SHARED_ROWS_H_
