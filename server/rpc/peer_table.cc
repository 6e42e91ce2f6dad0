// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/peer_table.h"

namespace lossd::rpc {

void PeerTable::Peer::Open(absl::Time now) {
  absl::MutexLock lock(&mutex_);
  ++totals_.open_streams;
  ++totals_.streams;
  totals_.last_active = now;
}

void PeerTable::Peer::Queued(int64_t bytes, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  totals_.received_bytes += bytes;
  totals_.last_active = now;
}

void PeerTable::Peer::Computed(double device_wait_seconds) {
  absl::MutexLock lock(&mutex_);
  totals_.device_wait_seconds += device_wait_seconds;
}

void PeerTable::Peer::Sent(int64_t rows, int64_t bytes, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  totals_.rows += rows;
  totals_.sent_bytes += bytes;
  totals_.last_active = now;
}

void PeerTable::Peer::Close() {
  absl::MutexLock lock(&mutex_);
  --totals_.open_streams;
}

PeerTotals PeerTable::Peer::totals() const {
  absl::MutexLock lock(&mutex_);
  return totals_;
}

std::shared_ptr<PeerTable::Peer> PeerTable::Open(const std::string& peer, absl::Time now) {
  absl::MutexLock lock(&mutex_);
  auto found = peers_.find(peer);
  if (found == peers_.end()) {
    while (peers_.size() >= most_ && ForgetOne()) {
    }
    found = peers_.emplace(peer, std::make_shared<Peer>()).first;
  }
  found->second->Open(now);
  return found->second;
}

bool PeerTable::ForgetOne() {
  auto idlest = peers_.end();
  absl::Time since = absl::InfiniteFuture();
  for (auto it = peers_.begin(); it != peers_.end(); ++it) {
    const PeerTotals totals = it->second->totals();
    if (totals.open_streams > 0 || totals.last_active >= since) continue;
    since = totals.last_active;
    idlest = it;
  }
  if (idlest == peers_.end()) return false;
  peers_.erase(idlest);
  return true;
}

std::vector<PeerTable::Entry> PeerTable::List() const {
  std::vector<Entry> entries;
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, peer] : peers_) entries.push_back({.peer = name, .totals = peer->totals()});
  return entries;
}

}  // namespace lossd::rpc
