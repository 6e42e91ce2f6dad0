// SPDX-License-Identifier: Apache-2.0
// The open connections of an HTTP server, and which of them make room for a new one: the oldest. Clients that
// open connections and send nothing can then hold only so many, and a scrape that arrives is always taken in.
//
// Thread-compatible.
#ifndef LOSSD_SERVER_METRICS_HTTP_CONNECTIONS_H_
#define LOSSD_SERVER_METRICS_HTTP_CONNECTIONS_H_

#include <cstddef>
#include <list>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace lossd::metrics {

struct HttpConnectionLimits {
  size_t in_all = 256;
  size_t per_address = 128;
  absl::Duration age = absl::Seconds(30);
};

class HttpConnections {
 private:
  struct Connection {
    int descriptor = -1;
    std::string address;
    absl::Time opened;
    bool dropped = false;
  };

 public:
  using Handle = std::list<Connection>::iterator;

  explicit HttpConnections(const HttpConnectionLimits& limits) : limits_(limits) {}

  // Enters a connection from `address` (without the port) that was opened at `now`, no earlier than those
  // before it. Appends to `drop` the descriptors that the caller is to shut down: connections older than the
  // limit, then the oldest of the address and the oldest of all, as far as there are too many. They stay
  // entered until Remove, but no longer count.
  Handle Add(int descriptor, absl::string_view address, absl::Time now, std::vector<int>* drop);
  void Remove(Handle connection);

  // Entered and not dropped.
  size_t size() const { return size_; }

 private:
  void Drop(Connection& connection, std::vector<int>* drop);
  size_t CountFrom(absl::string_view address) const;

  const HttpConnectionLimits limits_;
  std::list<Connection> connections_;  // the oldest first
  size_t size_ = 0;
};

}  // namespace lossd::metrics

#endif  // LOSSD_SERVER_METRICS_HTTP_CONNECTIONS_H_
