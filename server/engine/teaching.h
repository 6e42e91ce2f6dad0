// SPDX-License-Identifier: Apache-2.0
// Distillation in the engine: a stream of one head, the student, compares its rows with another head of the
// engine, the teacher. TeacherOf is what a stream knows of its teacher. Teaching is what a head knows of the
// streams that it teaches. CheckDistillation checks whether such a stream may begin.
//
// A teacher is frozen. It cannot be deleted while such streams are open. Chunks of its students count as its
// own chunks in flight, so operations on the teacher wait for them. The streams end when the teacher's
// weights change.
//
// Guarded by the engine's lock, which is held in all calls.
#ifndef LOSSD_SERVER_ENGINE_TEACHING_H_
#define LOSSD_SERVER_ENGINE_TEACHING_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/backend.h"
#include "server/engine/device_loop.h"
#include "server/engine/stream.h"

namespace lossd::engine {

class HeadSession;

// The teacher of a stream, and the version of its weights that the stream was opened with. Plain data;
// constant while the stream is open. The stream keeps the teacher's session alive, but not the head itself,
// which ends when it is deleted.
struct TeacherOf {
  std::shared_ptr<HeadSession> session;  // null: the stream has no teacher
  int64_t hidden_size = 0;
  uint64_t weights_version = 0;

  explicit operator bool() const { return session != nullptr; }
  // ABORTED if the teacher has other weights than when the stream was opened.
  absl::Status CheckBound() const;
};

// A head as a teacher: the open streams of other heads that it teaches.
class Teaching {
 public:
  // `kernels`: of the head.
  explicit Teaching(const kernels::HeadKernels* kernels) : kernels_(kernels) {}

  // Use it only for what never changes during the life of the head, and not once the head is being deleted.
  const kernels::HeadKernels& kernels() const { return *kernels_; }
  // Called when the head ends.
  void OnHeadGone() { kernels_ = nullptr; }
  // HeadKernels::paging(); nothing once the head is gone.
  std::optional<kernels::PagingStats> paging() const {
    return kernels_ == nullptr ? std::nullopt : kernels_->paging();
  }
  // Where the values of this head are.
  ValuesAre values() const;
  void Begin(HeadSession* student) { ++streams_[student]; }
  void End(HeadSession* student) {
    const auto it = streams_.find(student);
    if (--it->second == 0) streams_.erase(it);
  }
  int64_t streams() const;
  // The heads whose streams this head teaches.
  std::vector<HeadSession*> students() const;

 private:
  const kernels::HeadKernels* kernels_;
  std::map<HeadSession*, int64_t> streams_;
};

// Checks whether a stream of `student` may have this teacher, a published head, and completes spec->options.
// Errors as in lossd.v1.Distillation, with fields named "open...".
absl::StatusOr<TeacherOf> CheckDistillation(HeadSession& student, std::shared_ptr<HeadSession> teacher,
                                            StreamSpec* spec);

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_TEACHING_H_
