// SPDX-License-Identifier: Apache-2.0
// A worker's side of shared_rows.h: the leader's memory, mapped here, as staging memory of the worker's
// backend. It is not counted: the leader counts it.
//
// Thread-safe. One thread, which maps what the leader shares and unmaps what is gone.
#ifndef LOSSD_SERVER_RANKS_MAPPED_ROWS_H_
#define LOSSD_SERVER_RANKS_MAPPED_ROWS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "lossd/ranks/v1/ranks.pb.h"
#include "proto/wire/region_packets.h"

namespace lossd::ranks {

class MappedRows {
 public:
  // For the leader to answer a token.
  static constexpr absl::Duration kWelcomeTimeout = absl::Seconds(10);

  // UNAVAILABLE, saying why, if nobody listens there (the leader is on another host, or in another network
  // namespace), or another user does. The backend outlives the object.
  static absl::StatusOr<std::unique_ptr<MappedRows>> Connect(const std::string& socket,
                                                             const std::string& token,
                                                             kernels::Backend* backend);
  // Unmaps what no Rows holds.
  ~MappedRows();
  MappedRows(const MappedRows&) = delete;
  MappedRows& operator=(const MappedRows&) = delete;

  // Mapped memory that is read or written; stays mapped until the object goes, which is before the backend.
  struct Rows {
    std::shared_ptr<const void> region;
    uint8_t* data = nullptr;
  };
  // INTERNAL if no such region is mapped, or the bytes do not lie in it.
  absl::StatusOr<Rows> Find(const v1::RowsPlace& place, uint64_t bytes) const;

 private:
  struct Region;

  MappedRows(wire::OwnedDescriptor socket, kernels::Backend* backend);
  void Run();
  // Whether the connection goes on.
  bool Read();
  absl::Status Map(uint64_t region, uint64_t bytes, wire::OwnedDescriptor descriptor);

  const wire::OwnedDescriptor socket_;
  kernels::Backend* const backend_;
  const wire::OwnedDescriptor stop_;
  mutable absl::Mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Region>> regions_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_MAPPED_ROWS_H_
