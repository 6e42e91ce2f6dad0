// SPDX-License-Identifier: Apache-2.0
#include "server/engine/head_directory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {
namespace {

absl::Status BeingCreated(absl::string_view name) {
  return absl::UnavailableError(absl::StrCat("head ", name, " is being created"));
}

}  // namespace

// ---- Creation ----

absl::Status HeadDirectory::CheckFree(absl::string_view name) const {
  if (slots_.contains(name)) {
    return FieldError(absl::StatusCode::kAlreadyExists, "name", "is taken by another head", name);
  }
  if (static_cast<int64_t>(slots_.size()) >= max_heads_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", slots_.size(), " heads, the most allowed"));
  }
  return absl::OkStatus();
}

absl::Status HeadDirectory::Reserve(absl::string_view name) {
  if (absl::Status status = CheckFree(name); !status.ok()) return status;
  slots_.try_emplace(std::string(name), Slot{.number = ++last_number_});
  return absl::OkStatus();
}

void HeadDirectory::Fill(absl::string_view name, SessionPtr session) {
  slots_.find(name)->second.session = std::move(session);
}

absl::Status HeadDirectory::Publish(absl::string_view name) {
  if (auto found = Find(name); !found.ok()) return found.status();
  slots_.find(name)->second.published = true;
  return absl::OkStatus();
}

// ---- Deletion ----

absl::StatusOr<uint64_t> HeadDirectory::BeginDelete(absl::string_view name) {
  if (auto found = FindSlot(name); !found.ok()) return found.status();
  Slot& slot = slots_.find(name)->second;
  slot.deleting = true;
  return slot.number;
}

HeadDirectory::SessionPtr HeadDirectory::EndDelete(absl::string_view name, uint64_t number) {
  const auto it = slots_.find(name);
  if (it == slots_.end() || it->second.number != number) return nullptr;
  SessionPtr session = std::move(it->second.session);
  slots_.erase(it);
  return session;
}

void HeadDirectory::Remove(absl::string_view name) {
  if (const auto it = slots_.find(name); it != slots_.end()) slots_.erase(it);
}

std::vector<HeadDirectory::SessionPtr> HeadDirectory::RemoveAll() {
  std::vector<SessionPtr> sessions = Sessions();
  slots_.clear();
  return sessions;
}

// ---- Look-up ----

absl::StatusOr<const HeadDirectory::Slot*> HeadDirectory::FindSlot(absl::string_view name) const {
  const auto it = slots_.find(name);
  if (it != slots_.end() && !it->second.deleting) return &it->second;
  return UnknownHead(name);
}

absl::StatusOr<HeadDirectory::SessionPtr> HeadDirectory::Find(absl::string_view name) const {
  auto slot = FindSlot(name);
  if (!slot.ok()) return slot.status();
  if ((*slot)->session == nullptr) return BeingCreated(name);
  return (*slot)->session;
}

absl::StatusOr<HeadDirectory::SessionPtr> HeadDirectory::FindPublished(absl::string_view name) const {
  auto slot = FindSlot(name);
  if (!slot.ok()) return slot.status();
  if (!(*slot)->published) return BeingCreated(name);
  return (*slot)->session;
}

std::vector<HeadDirectory::SessionPtr> HeadDirectory::Sessions() const {
  std::vector<SessionPtr> sessions;
  for (const auto& [name, slot] : slots_) {
    if (slot.session != nullptr) sessions.push_back(slot.session);
  }
  return sessions;
}

std::vector<HeadDirectory::SessionPtr> HeadDirectory::Published() const {
  std::vector<SessionPtr> sessions;
  for (const auto& [name, slot] : slots_) {
    if (slot.published && !slot.deleting) sessions.push_back(slot.session);
  }
  return sessions;
}

int64_t HeadDirectory::published() const {
  return std::count_if(slots_.begin(), slots_.end(), [](const auto& slot) { return slot.second.published; });
}

}  // namespace lossd::engine
