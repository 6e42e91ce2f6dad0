// SPDX-License-Identifier: Apache-2.0
// The heads of an engine by name, and how far each has come: a name is taken when creation begins, the head
// is there when its session is, it is visible when it has been published, and it is gone for callers when
// deletion begins.
//
// Plain state; the engine's lock guards it.
#ifndef LOSSD_SERVER_ENGINE_HEAD_DIRECTORY_H_
#define LOSSD_SERVER_ENGINE_HEAD_DIRECTORY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lossd::engine {

class HeadSession;

class HeadDirectory {
 public:
  using SessionPtr = std::shared_ptr<HeadSession>;

  explicit HeadDirectory(int64_t max_heads) : max_heads_(max_heads) {}

  // ---- Creation ----
  // Takes a name. RESOURCE_EXHAUSTED, or ALREADY_EXISTS.
  absl::Status Reserve(absl::string_view name);
  // Whether Reserve would take it.
  absl::Status CheckFree(absl::string_view name) const;
  // Gives a reserved name its session.
  void Fill(absl::string_view name, SessionPtr session);
  // Makes a head visible. As Find.
  absl::Status Publish(absl::string_view name);

  // ---- Deletion ----
  // From now on the head is not found. Its number, for EndDelete. NOT_FOUND.
  absl::StatusOr<uint64_t> BeginDelete(absl::string_view name);
  // Frees the name of the head of that number; returns its session. Null if its creation has failed
  // meanwhile: then the name may be that of another head, which stays.
  SessionPtr EndDelete(absl::string_view name, uint64_t number);
  // Frees the name of a head that could not be created.
  void Remove(absl::string_view name);
  std::vector<SessionPtr> RemoveAll();

  // ---- Look-up ----
  // NOT_FOUND, or UNAVAILABLE while the head is being created.
  absl::StatusOr<SessionPtr> Find(absl::string_view name) const;
  // The same for a head that has been published; UNAVAILABLE before.
  absl::StatusOr<SessionPtr> FindPublished(absl::string_view name) const;
  // By name.
  std::vector<SessionPtr> Sessions() const;  // of all heads that are there, also those that are being deleted
  std::vector<SessionPtr> Published() const;  // of those that Find finds
  int64_t published() const;                  // those that are being deleted are counted

 private:
  struct Slot {
    uint64_t number = 0;  // no two heads have the same
    SessionPtr session;   // null while the head is being created
    bool published = false;
    bool deleting = false;
  };
  // NOT_FOUND if there is no such head.
  absl::StatusOr<const Slot*> FindSlot(absl::string_view name) const;

  const int64_t max_heads_;
  uint64_t last_number_ = 0;
  std::map<std::string, Slot, std::less<>> slots_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_HEAD_DIRECTORY_H_
