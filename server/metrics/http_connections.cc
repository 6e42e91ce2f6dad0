// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/http_connections.h"

#include <algorithm>
#include <iterator>

namespace lossd::metrics {

HttpConnections::Handle HttpConnections::Add(int descriptor, absl::string_view address, absl::Time now,
                                             std::vector<int>* drop) {
  connections_.push_back({.descriptor = descriptor, .address = std::string(address), .opened = now});
  ++size_;
  bool too_many_of_address = CountFrom(address) > limits_.per_address;
  for (Connection& connection : connections_) {
    if (connection.dropped) continue;
    const bool of_address = connection.address == address;
    const bool too_old = now - connection.opened > limits_.age;
    if (!too_old && size_ <= limits_.in_all && !(too_many_of_address && of_address)) continue;
    if (of_address) too_many_of_address = false;
    Drop(connection, drop);
  }
  return std::prev(connections_.end());
}

void HttpConnections::Remove(Handle connection) {
  if (!connection->dropped) --size_;
  connections_.erase(connection);
}

void HttpConnections::Drop(Connection& connection, std::vector<int>* drop) {
  connection.dropped = true;
  --size_;
  drop->push_back(connection.descriptor);
}

size_t HttpConnections::CountFrom(absl::string_view address) const {
  return static_cast<size_t>(
      std::count_if(connections_.begin(), connections_.end(), [address](const Connection& connection) {
        return !connection.dropped && connection.address == address;
      }));
}

}  // namespace lossd::metrics
